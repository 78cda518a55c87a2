# SPDX-License-Identifier: Apache-2.0
"""The output of `--mode=show` and `--list`."""

import math
from collections.abc import Iterator
from typing import Any

import fiddle as fdl

from paxlike import fiddlers, registry
from paxlike.cli import knob_page
from paxlike.config import building, graph_file, local_experiments
from paxlike.devices import mesh, topology
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.layers import flops
from paxlike.layers.module import Definition
from paxlike.telemetry import formatting
from paxlike.training import state_memory
from paxlike.training.trainer import Trainer


def experiments() -> str:
  """Returns a table of all registered experiments."""
  rows = []
  for path, cls in registry.registered().items():
    experiment = cls()
    model = experiment.model()
    experiment.adjust(model)
    fiddlers.stack(model, scan=True)  # The same parameter count with far fewer objects.
    definition = Definition(building.build(model))
    summary = (cls.__doc__ or "").strip().split("\n")[0]
    rows.append((path.rpartition(".")[2], f"{definition.num_params:,}", summary))
  text = formatting.table(("experiment", "parameters", ""), rows, right=(1,))
  local = [(found.name, found.doc) for found in local_experiments.find()]
  if local:
    text += f"\n\n{formatting.table(('in this folder (parsed, not imported)', ''), local)}"
  return text


def everything(experiment: Experiment | None, graph: fdl.Config[Trainer]) -> str:
  """Returns the knobs, the flattened graph, and the sizes of model, batch, mesh and memory."""
  parts = [] if experiment is None else [knob_page.table(experiment)]
  parts += [graph_file.describe(graph), _facts(building.build(graph))]
  return "\n\n".join(parts)


def changed(experiment: Experiment, graph: fdl.Config[Trainer]) -> str:
  """Returns the knobs that differ from the family's defaults, and the edits of the graph."""
  knobs = knob_page.table(experiment, changed=True)
  edits = graph_file.difference(experiment.trainer(), graph)
  return "\n\n".join(filter(None, (knobs, edits))) or (
    f"No knob of {type(experiment).__name__} differs from the default of its family."
  )


def difference(graph: Any, other: Any, *, name: str) -> str:
  """Returns the assignments that turn `other`, the graph of experiment `name`, into `graph`."""
  return graph_file.difference(other, graph) or f"No difference from {name}."


def _facts(trainer: Trainer) -> str:
  definition = trainer.definition
  sizes, note = _axis_sizes(trainer.mesh)
  num_devices = math.prod(sizes.values())
  batch = mesh.global_batch_size(
    percore=trainer.percore_batch_size,
    num_devices=num_devices,
    accumulation_steps=trainer.accumulation_steps,
  )
  seq_len = trainer.data.seq_len
  counted = flops.per_token(definition, seq_len)
  axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
  active = flops.active_params(definition)
  per_token = "" if active == definition.num_params else f", {active:,} active per token"
  has_frozen = definition.num_trained < definition.num_params
  rows = [
    ("parameters", f"{definition.num_params:,}{per_token}"),
    *([("trained parameters", f"{definition.num_trained:,}")] if has_frozen else []),
    ("FLOPs per token", f"{counted.causal:.4g} (causal attention), {counted.full:.4g} (full)"),
    ("global batch", f"{batch:,} sequences = {batch * seq_len:,} tokens"),
    ("mesh", f"{num_devices} devices: {axes}{note}"),
    *_memory(trainer, sizes),
    *(("not sharded", line) for line in _undivided(definition, sizes)),
  ]
  return formatting.table(("", ""), rows)


def _axis_sizes(spec: mesh.MeshSpec) -> tuple[dict[str, int], str]:
  """Returns the axis sizes of the mesh, and a note if it does not fit this machine's devices."""
  devices = topology.devices()
  here = len(devices)
  try:
    ici, dcn = spec.sizes(here, slices=mesh.num_slices(devices))
    note = ""
  except UserError:
    ici, dcn = spec.sizes(None)
    note = f" (here: {here})"
  return {axis: ici[axis] * dcn[axis] for axis in mesh.AXES}, note


def _memory(trainer: Trainer, sizes: dict[str, int]) -> Iterator[tuple[str, str]]:
  """Yields the memory of the training state, or of read-only parameters: per device, in total."""
  for kind, (one, whole) in state_memory.by_kind(trainer, sizes).items():
    yield (
      f"memory of {kind}",
      f"{formatting.nbytes(one)} per device ({formatting.nbytes(whole)} in total)",
    )


def _undivided(definition: Definition, sizes: dict[str, int]) -> list[str]:
  """Returns the dims that mesh axes should shard but do not divide."""
  found = set()
  for spec in definition.weights.values():
    for dim, size in zip(spec.dims, spec.shape, strict=True):
      shards = math.prod(sizes[axis] for axis in mesh.RULES[dim])
      if size % shards:
        axes = " x ".join(f"{a} {sizes[a]}" for a in mesh.RULES[dim] if sizes[a] > 1)
        found.add(f"{dim} {size:,} is not divisible by {axes}")
  return sorted(found)
