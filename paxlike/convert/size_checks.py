# SPDX-License-Identifier: Apache-2.0
"""Compares the sizes in a configuration with the tensors, before the model is built."""

import contextlib
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paxlike.checkpoints.hf_family import Family
from paxlike.checkpoints.hf_rules import PerExpert
from paxlike.config import ranges
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError

# Sizes that are dims of tensors, or divide one: the largest dim in the files bounds them.
_DIMS = (
  *("VOCAB_SIZE", "MODEL_DIMS", "HIDDEN_DIMS", "EXPERT_DIMS", "LATENT_DIMS", "QUERY_LATENT_DIMS"),
  *("NUM_EXPERTS", "NUM_HEADS", "NUM_KV_HEADS", "DIMS_PER_HEAD", "DIMS_PER_ROPE_HEAD"),
  *("DIMS_PER_VALUE_HEAD", "PER_LAYER_DIMS"),
)
_MOST = {
  "NUM_LAYERS": ranges.MOST_LAYERS,
  "NUM_HEADS": 2**16,
  "DIMS_PER_HEAD": 2**16,
  "NUM_EXPERTS": 2**16,
}
_MOST_OF_ALL = 2**31 - 1
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")


def check(knobs: Mapping[str, Any], family: Family, found: Mapping[str, TensorSpec]):
  """Compares the sizes in a configuration with those of the tensors.

  Args:
    knobs: The configuration as knobs, from `family.read`.
    family: Maps the knobs to the configuration's keys.
    found: The tensors by name.

  Raises:
    UserError: The model would be larger than the tensors.
  """
  keys = {knob: key for key, knob in family.knobs.items()}
  layers = {match[1] for name in found if (match := _NUMBER.search(name))}
  largest = max((size for spec in found.values() for size in spec.shape), default=0)
  limits = dict.fromkeys(_DIMS, largest)
  limits |= {"NUM_LAYERS": len(layers), "NUM_DENSE_LAYERS": len(layers)}
  num_layers = knobs.get("NUM_LAYERS")
  if any(isinstance(rule, PerExpert) for rule in family.rules.values()) and num_layers:
    kinds = knobs.get("LAYER_TYPES", ("moe",) * num_layers)
    sparse = kinds.count("moe") - (knobs.get("NUM_DENSE_LAYERS") or 0)
    limits["NUM_EXPERTS"] = len(found) // max(sparse, 1)
  for knob, value in knobs.items():
    if type(value) is not int:
      continue
    key, most = keys.get(knob, knob), _MOST.get(knob, _MOST_OF_ALL)
    limit = limits.get(knob, _MOST_OF_ALL)
    if most < abs(value) <= limit:
      raise UserError(f"config.json: {key} is {value}; paxlike makes models of at most {most}.")
    if abs(value) > limit:
      there = f"{len(layers)} layers" if "LAYERS" in knob else f"sizes up to {largest}"
      raise UserError(
        f"config.json: {key} is {value}, but there are {len(found)} tensors, of {there}."
      )


@contextlib.contextmanager
def describing(config: pathlib.Path) -> Iterator[None]:
  """Context for building a model from an untrusted configuration, which may raise any error.

  Raises:
    UserError: The model cannot be built; names the configuration.
  """
  try:
    yield
  except UserError as error:
    if config.name in str(error):
      raise
    raise UserError(f"{config}: {error}") from None
  except Exception as error:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise UserError(f"{config}: no model can be built from it: {said.rstrip('.')}.") from error
