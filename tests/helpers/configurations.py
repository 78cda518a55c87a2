# SPDX-License-Identifier: Apache-2.0
"""Models and configurations to predict."""

import dataclasses
from typing import Any

import fiddle as fdl

from paxlike import registry
from paxlike.devices.mesh import AXES
from paxlike.planning import model_sizes
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration


def trainer(name: str, **knobs: Any) -> Any:
  return fdl.build(registry.find(name)(USE_REPEATED_LAYER=True, **knobs).trainer())


def sizes(name: str, **knobs: Any) -> ModelSizes:
  """As on devices that have a kernel for attention."""
  made = trainer(name, **knobs)
  model = model_sizes.of_definition(made.definition, made.optimizer, seq_len=made.data.seq_len)
  return dataclasses.replace(model, fused_attention=True)


def on(batch: int, dcn: dict[str, int] | None = None, **ici: int) -> Configuration:
  of_ici, of_dcn = (tuple(one.get(axis, 1) for axis in AXES) for one in (ici, dcn or {}))
  return Configuration(ici=of_ici, dcn=of_dcn, batch=batch)
