# SPDX-License-Identifier: Apache-2.0
"""The formats in which a model is exported, each from Hugging Face's tensors and `config.json`."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paxlike.convert import safetensors_files
from paxlike.convert.quantized import Tensors
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError, did_you_mean


class Form(Protocol):
  """A format of files.

  Attributes:
    reads_compute_dtype: Whether weights are first cast to the compute dtype of the run, which
      quantizes them as they are in its matmuls.
  """

  reads_compute_dtype: bool

  def check(self, specs: Mapping[str, TensorSpec], config: Mapping[str, Any]):
    """Raises a UserError if the format cannot hold a model; reads no weights."""
    ...

  def write(self, folder: pathlib.Path, tensors: Tensors, config: Mapping[str, Any]):
    """Writes a model.

    Args:
      folder: Holds nothing but the tokenizer's files.
      tensors: Hugging Face's tensors.
      config: Hugging Face's `config.json`.

    Raises:
      UserError: A value is beyond the range of its dtype, or the tokenizer has no place in it.
    """
    ...


class Plain:
  """Safetensors of the weights as they are."""

  reads_compute_dtype = False

  def check(self, specs: Mapping[str, TensorSpec], config: Mapping[str, Any]):
    del specs, config

  def write(self, folder: pathlib.Path, tensors: Tensors, config: Mapping[str, Any]):
    safetensors_files.write(folder, tensors.specs, tensors.read)
    write_config(folder, config)


def write_config(folder: pathlib.Path, config: Mapping[str, Any]):
  """Writes `config.json`."""
  (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _gguf(quantization: str | None = None) -> Form:
  from paxlike.convert.gguf_files import Gguf

  return Gguf(quantization)


def _fp8() -> Form:
  from paxlike.convert.quantized_forms import Fp8

  return Fp8("fp8_blocks")


def _compressed(name: str, rule: str) -> Form:
  from paxlike.convert.quantized_forms import Compressed

  return Compressed(name, rule)


# Value of --to_format -> the format, whose modules are imported when it is used.
FORMS: Mapping[str, Callable[[], Form]] = {
  "hf": Plain,
  "gguf": _gguf,
  "gguf_q8_0": functools.partial(_gguf, "Q8_0"),
  "fp8_blocks": _fp8,
  "compressed_fp8": functools.partial(_compressed, "compressed_fp8", "FP8"),
  "compressed_int8": functools.partial(_compressed, "compressed_int8", "INT8"),
  "compressed_int4": functools.partial(_compressed, "compressed_int4", "INT4"),
}


def form(name: str) -> Form:
  """Returns a format by its name.

  Raises:
    UserError: There is none, or the package that writes it is not installed.
  """
  if name not in FORMS:
    hint = did_you_mean(name, FORMS) or f" One of {', '.join(FORMS)}."
    raise UserError(f"--to_format={name} is unknown.{hint}")
  try:
    return FORMS[name]()
  except ModuleNotFoundError as error:
    if error.name != "gguf":
      raise
    raise UserError(
      f"--to_format={name} needs the package gguf: pip install paxlike[gguf]."
    ) from None
