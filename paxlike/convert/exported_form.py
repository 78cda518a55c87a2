# SPDX-License-Identifier: Apache-2.0
"""A format in which a model is exported, from Hugging Face's tensors and `config.json`."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from paxlike.convert import safetensors_files
from paxlike.convert.quantized import Tensors
from paxlike.convert.safetensors_files import TensorSpec


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
