# SPDX-License-Identifier: Apache-2.0
"""Searches for the fastest parallel configuration that fits in memory.

It tries all meshes whose axes divide the dims that they shard, with each remat policy, number of
microbatches and pipeline. `memory_model` drops those that do not fit, `cost_model` ranks the rest,
and the best of each mesh is kept. Not tried are:

- tensor, expert and context across slices or nodes, whose networks are too slow;
- shards of sequences (context) of less than 4,096 tokens, unless the attention kernel needs some;
- gpipe and circular, which take as long as 1f1b and interleaved_1f1b and never use less memory;
- gradient accumulation together with a pipeline, which has microbatches of its own;
- more accumulation than a mesh and policy need to fit, which only takes longer.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from paxlike.compilation import aot
from paxlike.devices import interconnect, mesh
from paxlike.devices.mesh import AXES
from paxlike.errors import UserError
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.remat import Remat
from paxlike.planning import accuracy, cost_model, machines, memory_model, model_sizes
from paxlike.planning.machines import Machine
from paxlike.planning.measured_rates import MeasuredRates
from paxlike.planning.memory_model import Memory
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration
from paxlike.planning.times import Times
from paxlike.training import requirements
from paxlike.training.objectives import NextToken
from paxlike.training.trainer import Trainer

# A plan's predicted peak may take this fraction of a device's usable memory: where memory is short,
# nearly all predictions are at most 7 % too low (docs/results.md).
MAX_SHARE = 0.9
# Knobs that a plan sets and the command line must not. CHECKPOINT_POLICY may be set there.
CHOSEN = (
  "ICI_MESH_SHAPE",
  "DCN_MESH_SHAPE",
  "GRADIENT_ACCUMULATION_STEPS",
  "NUM_STAGES",
  "NUM_VIRTUAL_STAGES",
  "CIRCULAR_REPEAT",
  "NUM_MICROBATCHES",
  "PIPELINE_SCHEDULE",
  "PIPELINE_RECOMPUTE",
)
# Those that are tried. Not SAVE_DOT_ONLY: with fused attention, it saves the same as
# SAVE_DOT_WITH_NO_BATCH_DIM.
REMATS = (Remat.SAVE_EVERYTHING, Remat.SAVE_DOT_WITH_NO_BATCH_DIM, Remat.SAVE_NOTHING)
_ACROSS = ("pipeline", "data", "fsdp")  # Axes that may span slices or nodes.
_LEAST_TOKENS = 4096  # Of a shard of a sequence.
_MOST_MICROBATCHES = 32  # Per stage; bubbles are then below 3 %.
_PADDED = 1.1  # Stages may compute a tenth more layers than there are.

# Knobs -> the experiment's trainer with these knobs.
Build = Callable[[Mapping[str, Any]], Trainer]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A configuration with its predicted memory and time.

  Attributes:
    how: The configuration.
    memory: The predicted memory.
    times: The predicted time.
    compiled: The memory of the compiled step; None: not compiled.
    fits: Whether it fits in memory, by the compiled step if there is one.
  """

  how: Configuration
  memory: Memory
  times: Times
  compiled: aot.ProgramMemory | None = None
  fits: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plans:
  """The result of a search.

  Attributes:
    model: The model's sizes.
    machine: The hardware.
    device_kind: JAX's name of it.
    num_devices: The number of devices.
    batch: The global batch, in sequences.
    considered: The number of configurations tried.
    fitting: The number of those that fit.
    best: The best configuration of each mesh, fastest first.
    nearest: The configuration with the least memory.
  """

  model: ModelSizes
  machine: Machine
  device_kind: str
  num_devices: int
  batch: int
  considered: int
  fitting: int
  best: tuple[Plan, ...]
  nearest: Plan

  @property
  def first(self) -> Plan | None:
    """The fastest plan, without those whose compiled program does not fit."""
    return next((plan for plan in self.best if plan.fits), None)

  def mfu(self, plan: Plan, *, causal: bool = False) -> float:
    """Returns the model FLOPs utilization; full attention unless `causal`."""
    flops = self.model.flops.causal if causal else self.model.flops.full
    rate = self.batch * self.model.seq_len * flops / plan.times.total
    return rate / self.num_devices / self.machine.chip.flops

  def error(self, plan: Plan) -> float:
    """Returns the expected error of a plan's predicted time, as a fraction."""
    return accuracy.expected_error(self.model, plan.how, self.machine.chip)

  def is_tie(self, plan: Plan) -> bool:
    """Returns whether a plan may be as fast as the fastest: they differ by less than the errors."""
    first = self.first
    if first is None:
      return False
    slowest = first.times.total * (1 + self.error(first))
    return plan.times.total * (1 - self.error(plan)) <= slowest

  def reason(self) -> str | None:
    """Returns the largest differences, by cause, between the fastest plan and the next mesh."""
    fitting = [plan for plan in self.best if plan.fits]
    if len(fitting) < 2:
      return None
    first, second = (plan.times for plan in fitting[:2])
    saved = (second + first * -1).parts
    causes = sorted(saved, key=lambda name: -abs(saved[name]))[:3]
    parts = [f"{name} {saved[name]:+.3f} s" for name in causes if saved[name]]
    return f"the next mesh takes {second.total - first.total:+.3f} s: {', '.join(parts)}"

  def tokens_per_second(self, plan: Plan) -> float:
    """Returns the training throughput of all devices in tokens per second."""
    return self.batch * self.model.seq_len / plan.times.total


def find(
  build: Build,
  devices: list[Any],
  *,
  batch: int | None = None,
  remats: Sequence[Remat] = REMATS,
  dcn_bandwidth: float | None = None,
  measured: MeasuredRates | None = None,
) -> Plans:
  """Ranks the parallel configurations of an experiment.

  Args:
    build: Builds the experiment's trainer.
    devices: The devices, which need not be attached.
    batch: The global batch in sequences; None: the experiment's.
    remats: The remat policies to try.
    dcn_bandwidth: Bytes/s that a device sends across slices or nodes; None: that of the data sheet.
    measured: Rates of kernels that were measured on such devices.

  Raises:
    UserError: The devices' data sheet is unknown, rates are of others, or no mesh divides the
      batch.
  """
  kind = devices[0].device_kind
  machine = machines.find(kind, dcn_bandwidth=dcn_bandwidth)
  if machine is None:
    raise UserError(
      f"--mode=plan has no data sheet of {kind}: give a --topology such as v5e-256 or h100-64."
    )
  if measured is not None:
    machine = dataclasses.replace(machine, rates=measured.applied(machine.rates, kind))
  within = len(devices) // len({interconnect.place(device) for device in devices})
  shape = (within, len(devices) // within)
  trainer = build(_plain(shape))
  requirements.check(trainer.model, devices)
  if trainer.train_data is None:
    raise UserError("this experiment has no training data: there is nothing to plan.")
  if batch is None:
    batch = mesh.global_batch_size(percore=trainer.percore_batch_size, num_devices=len(devices))
  model = model_sizes.of_definition(
    trainer.definition,
    trainer.optimizer,
    seq_len=trainer.data.seq_len,
    beside=trainer.models_beside,
  )
  if not isinstance(trainer.objective, NextToken):
    model = dataclasses.replace(model, repeats=0)
  return rank(model, machine, shape, kind, batch, remats)


def rank(
  model: ModelSizes,
  machine: Machine,
  shape: tuple[int, int],
  kind: str,
  batch: int,
  remats: Sequence[Remat] = REMATS,
) -> Plans:
  """Ranks the parallel configurations of a model; `shape` is (devices per slice or node, slices).

  Raises:
    UserError: No mesh divides the batch.
  """
  budget = MAX_SHARE * machine.chip.usable_memory
  best: list[Plan] = []
  nearest: Plan | None = None
  considered = fitting = 0
  for ici, dcn in meshes(model, shape):
    found: Plan | None = None
    for series in configurations(model, ici, dcn, batch, remats):
      for how in series:
        considered += 1
        memory = memory_model.of(model, how, machine.network)
        if nearest is None or memory.total < nearest.memory.total:
          nearest = Plan(how, memory, Times(), fits=False)
        if memory.total > budget:
          continue
        fitting += 1
        plan = Plan(how, memory, cost_model.of(model, how, machine))
        if found is None or _order(plan) < _order(found):
          found = plan
        break
    best += [found] if found is not None else []
  if nearest is None:
    raise UserError(
      f"no mesh of {math.prod(shape)} devices divides a batch of {batch} sequences: data x fsdp x"
      " expert must divide it, heads and layers limit tensor and pipeline, and a context-parallel"
      " ATTENTION_KERNEL needs context. Change --global_batch."
    )
  nearest = dataclasses.replace(nearest, times=cost_model.of(model, nearest.how, machine))
  return Plans(
    model=model,
    machine=machine,
    device_kind=kind,
    num_devices=math.prod(shape),
    batch=batch,
    considered=considered,
    fitting=fitting,
    best=tuple(sorted(best, key=_order)),
    nearest=nearest,
  )


def confirmed(plans: Plans, build: Build, count: int) -> Plans:
  """Compiles the best `count` plans, which takes minutes, and returns plans with their memory."""
  best = list(plans.best)
  for place, plan in enumerate(best[:count]):
    program = aot.compile_step(build(plan.how.knobs))
    best[place] = dataclasses.replace(plan, compiled=program.memory, fits=program.fits)
    del program
    jax.clear_caches()
  return dataclasses.replace(plans, best=tuple(best))


def _order(plan: Plan) -> tuple[float, float]:
  return plan.times.total, plan.memory.total


def _plain(shape: tuple[int, int]) -> dict[str, Any]:
  """Returns the knobs of a pure fsdp mesh, on which any model can be built."""
  ici, dcn = (tuple(size if axis == "fsdp" else 1 for axis in AXES) for size in shape)
  knobs = Configuration(ici=ici, dcn=dcn, batch=math.prod(shape)).knobs
  return {name: value for name, value in knobs.items() if name != "PERCORE_BATCH_SIZE"}


def meshes(
  model: ModelSizes, shape: tuple[int, int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
  """Yields (ICI, DCN) axis sizes that divide the dims that they shard."""
  # An axis that can only have size 1 is left out, which saves meshes.
  long = model.seq_len >= 2 * _least_shard(model)
  axes = [axis for axis in AXES if axis != "context" or (model.splits_sequences and long)]
  across = list(_factored(shape[1], _ACROSS))
  for ici in _factored(shape[0], axes):
    for dcn in across:
      sizes = {axis: ici.get(axis, 1) * dcn.get(axis, 1) for axis in AXES}
      if _allows(model, sizes):
        yield tuple(ici.get(axis, 1) for axis in AXES), tuple(dcn.get(axis, 1) for axis in AXES)


def _factored(size: int, axes: Iterable[str]) -> Iterator[dict[str, int]]:
  """Yields every way to give each axis a factor of a size."""
  first, *rest = axes
  if not rest:
    yield {first: size}
    return
  for factor in divisors(size):
    for others in _factored(size // factor, rest):
      yield {first: factor, **others}


def divisors(number: int) -> list[int]:
  """Returns the divisors of a number in ascending order."""
  small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
  return sorted({*small, *(number // n for n in small)})


def _allows(model: ModelSizes, sizes: Mapping[str, int]) -> bool:
  """Returns whether the axis sizes divide the model's dims that they shard."""
  tensor, fsdp, expert = sizes["tensor"], sizes["fsdp"], sizes["expert"]
  stages, context = sizes["pipeline"], sizes["context"]
  wide = [
    size
    for weight in model.in_stack
    for dim, size in zip(weight.dims, weight.shape, strict=True)
    if dim == "ffn"
  ]
  return (
    model.least_heads % tensor == 0
    and all(size % tensor == 0 for size in wide)
    and model.dim % fsdp == 0
    and model.num_experts % expert == 0
    and (model.whole_sequences if context == 1 else _splits_sequences(model, context))
    and (stages == 1 or (model.splits_layers and stages <= model.repeats))
  )


def _splits_sequences(model: ModelSizes, context: int) -> bool:
  """Returns whether sequences may be sharded over so many devices."""
  return model.splits_sequences and model.seq_len % (context * _least_shard(model)) == 0


def _least_shard(model: ModelSizes) -> int:
  """Returns the tokens of the smallest shard of a sequence: two blocks, or the least that pays."""
  return _LEAST_TOKENS if model.whole_sequences else 2


def configurations(
  model: ModelSizes,
  ici: tuple[int, ...],
  dcn: tuple[int, ...],
  batch: int,
  remats: Sequence[Remat] = REMATS,
) -> Iterator[Iterator[Configuration]]:
  """Yields series of configurations of a mesh; the first of a series that fits is its fastest."""
  base = Configuration(ici=ici, dcn=dcn, batch=batch, residual_over_tensor=model.sequence_parallel)
  shards = math.prod(base.sizes[axis] for axis in mesh.RULES["batch"])
  if batch % shards:
    return
  counts, stages = divisors(batch // shards), base.sizes["pipeline"]
  for remat in remats:
    if stages == 1:
      yield (dataclasses.replace(base, remat=remat, accumulation=count) for count in counts)
      continue
    for pipeline in _pipelines(model, stages, counts):
      yield iter((dataclasses.replace(base, remat=remat, pipeline=pipeline),))


def _pipelines(model: ModelSizes, stages: int, counts: list[int]) -> Iterator[Pipeline]:
  most = model.repeats // stages
  sizes = {-(-model.repeats // (stages * chunks)): chunks for chunks in range(most, 0, -1)}
  # If several numbers of chunks give the same size of chunk, the smallest pads least.
  several = sorted(
    chunks for size, chunks in sizes.items() if size * stages * chunks <= _PADDED * model.repeats
  )
  for chunks, count, recompute in itertools.product(several, counts, (False, True)):
    if chunks > 1 and count % stages:
      continue
    if stages <= count <= _MOST_MICROBATCHES * stages:
      yield Pipeline(
        schedule="1f1b" if chunks == 1 else "interleaved_1f1b",
        stages=stages,
        chunks=chunks,
        microbatches=count,
        recompute=recompute,
      )
