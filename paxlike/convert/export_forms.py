# SPDX-License-Identifier: Apache-2.0
"""The formats in which a model is exported, each from Hugging Face's tensors and `config.json`."""

import importlib
import json
import pathlib
from collections.abc import Mapping
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


# Value of --to_format -> (module, class, arguments), imported when it is used.
FORMS: Mapping[str, tuple[str, str, tuple[Any, ...]]] = {
  "hf": ("export_forms", "Plain", ()),
  "gguf": ("gguf_files", "Gguf", ()),
  "gguf_q8_0": ("gguf_files", "Gguf", ("Q8_0",)),
  "fp8_blocks": ("quantized_forms", "Fp8", ("fp8_blocks",)),
  "compressed_fp8": ("quantized_forms", "Compressed", ("compressed_fp8", "FP8")),
  "compressed_int8": ("quantized_forms", "Compressed", ("compressed_int8", "INT8")),
  "compressed_int4": ("quantized_forms", "Compressed", ("compressed_int4", "INT4")),
}


def form(name: str) -> Form:
  """Returns a format by its name.

  Raises:
    UserError: There is none, or the package that writes it is not installed.
  """
  if name not in FORMS:
    hint = did_you_mean(name, FORMS) or f" One of {', '.join(FORMS)}."
    raise UserError(f"--to_format={name} is unknown.{hint}")
  module, cls, arguments = FORMS[name]
  try:
    return getattr(importlib.import_module(f"paxlike.convert.{module}"), cls)(*arguments)
  except ModuleNotFoundError as error:
    if error.name and error.name.startswith("paxlike"):
      raise
    raise UserError(
      f"--to_format={name} needs the package {error.name}: pip install paxlike[export]."
    ) from None
