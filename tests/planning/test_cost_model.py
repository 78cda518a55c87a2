# SPDX-License-Identifier: Apache-2.0
"""Laws of what a configuration costs, and how the published rows come out."""

import dataclasses
import math
import statistics
from typing import Any

import fiddle as fdl
import jax
import pytest

from benchmarks import calibration
from paxlike import registry
from paxlike.devices import interconnect
from paxlike.devices.interconnect import Group
from paxlike.devices.mesh import AXES
from paxlike.layers import flops
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.stack import Remat
from paxlike.planning import cost_model, memory_model, model_sizes
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration
from paxlike.training import train_state

DENSE, EXPERTS = ("Synthetic126M", "SyntheticLLaMA70B"), ("Mixtral8x7B", "DeepSeekV3")
MACHINE: Any = cost_model.machine("NVIDIA H100")


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


def bytes_here(tree: Any) -> int:
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
    if leaf.ndim
  )


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
@pytest.mark.parametrize(
  "axes",
  [
    {"fsdp": 8},
    {"data": 2, "tensor": 4},
    {"fsdp": 2, "expert": 2, "tensor": 4},
    {"pipeline": 2, "fsdp": 4},
    {"data": 2, "fsdp": 4, "tensor": 16},
  ],
)
def test_what_is_held_between_steps_is_exact(name, axes):
  for over_data in (False, True):
    made = trainer(name, SHARD_OPTIMIZER_OVER_DATA=over_data, ADAM_MOMENT_DTYPE="bfloat16")
    how = on(64, **axes)
    shape = jax.sharding.AbstractMesh(tuple(how.sizes.values()), AXES)
    state = train_state.abstract(made.definition, made.optimizer, shape)
    model = model_sizes.of_definition(made.definition, made.optimizer, seq_len=2048)
    held = memory_model.of(model, how, MACHINE.network)
    assert held.weights == bytes_here((state.params, state.extra))
    # Of weights that no optimizer changes there is no such state.
    assert held.optimizer == pytest.approx(bytes_here(state.opt_state), rel=1e-6)
    assert model.num_params >= made.definition.num_params


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS, "Gemma2_2B", "SyntheticGLaM126M64E"])
def test_flops_are_those_of_the_one_place_that_counts_them(name):
  made = trainer(name)
  model = model_sizes.of_definition(made.definition, made.optimizer, seq_len=2048)
  counted = flops.per_token(made.definition, 2048)
  weights = sum(weight.flops for weight in model.weights)
  assert 3 * (weights + model.scores[0]) == pytest.approx(counted.full)
  assert 3 * (weights + model.scores[1]) == pytest.approx(counted.causal)
  assert model.flops == counted


def test_adapters_are_all_that_lora_trains():
  model = sizes("SyntheticLLaMA7B", USE_LORA=True, LORA_RANK=32)
  assert sum(weight.size for weight in model.weights if weight.trained) == 79_953_920
  trained = sum((3 if weight.trained else 2) * weight.flops for weight in model.weights)
  assert trained + 3 * model.scores[0] == pytest.approx(model.flops.full)


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_more_devices_hold_less_each(name):
  model = sizes(name)
  held = [
    memory_model.of(model, on(256, fsdp=count), MACHINE.network).total
    for count in (1, 2, 8, 32, 256)
  ]
  assert held == sorted(held, reverse=True)


def test_what_is_saved_is_not_computed_again():
  model = sizes("SyntheticLLaMA70B")
  order = (Remat.SAVE_NOTHING, Remat.SAVE_DOT_WITH_NO_BATCH_DIM, Remat.SAVE_EVERYTHING)
  hows = [dataclasses.replace(on(64, fsdp=8), remat=remat) for remat in order]
  held = [memory_model.of(model, how, MACHINE.network).activations for how in hows]
  seconds = [cost_model.of(model, how, MACHINE).total for how in hows]
  assert held == sorted(held) and seconds == sorted(seconds, reverse=True)
  # Nothing but sums needs the last product of a layer.
  ahead = sum(weight.flops for weight in model.in_stack if not weight.is_last) + model.scores[1]
  more = (
    cost_model.of(model, hows[0], MACHINE) + cost_model.of(model, hows[2], MACHINE) * -1
  ).parts
  tokens = 64 * model.seq_len / 8
  rate = MACHINE.chip.flops * MACHINE.achieved
  assert more["compute"] == pytest.approx(tokens * ahead / rate)


def test_a_pipeline_waits_as_its_schedule_says():
  model = sizes("Synthetic175B")
  found = {}
  for count in (1, 3):
    pipeline = Pipeline(
      schedule="interleaved_1f1b" if count > 1 else "1f1b",
      stages=8,
      chunks=count,
      microbatches=64,
      recompute=False,
    )
    how = dataclasses.replace(on(128, {"pipeline": 8}, tensor=8), pipeline=pipeline)
    found[count] = cost_model.of(model, how, MACHINE)
    layers = 3 * (found[count].total - found[count].update)
    assert found[count].bubble == pytest.approx(layers / 3 * pipeline.plan.bubble, rel=0.1)
    more = dataclasses.replace(pipeline, recompute=True)
    again = cost_model.of(model, dataclasses.replace(how, pipeline=more), MACHINE)
    assert again.compute > found[count].compute
  assert found[3].bubble < 0.5 * found[1].bubble


def test_networks():
  h100, v5e = interconnect.find("NVIDIA H100"), interconnect.find("TPU v5 lite")
  assert h100 is not None and v5e is not None
  assert interconnect.find("cpu") is None
  node, across = Group(8, 1, 8), Group(8, 8, 8)
  assert interconnect.gather(h100, node, 450e9) == pytest.approx(7 / 8)
  # Eight ports of a node fetch seven eighths.
  assert interconnect.gather(h100, across, 400e9) == pytest.approx(63 / 64 * 400 / 450)
  assert interconnect.gather(h100, Group(1, 8, 8), 50e9) == pytest.approx(7 / 8)
  assert (
    interconnect.reduce(h100, Group(1, 1, 8), 1e9)
    == interconnect.send(h100, Group(1, 1, 8), 1e9)
    == 0
  )
  # Of a torus of 16 x 16, sixteen chips have one of two dims; a smaller slice is open.
  assert interconnect.rate(v5e, Group(256, 1, 256)) == 200e9
  assert interconnect.rate(v5e, Group(16, 1, 256)) == pytest.approx(100e9)
  assert interconnect.rate(v5e, Group(16, 1, 16)) == pytest.approx(100e9)
  assert interconnect.exchange(h100, node, 450e9) == pytest.approx(7 / 8)


def test_the_published_rows_come_out_as_recorded():
  """The shares that chips are taken to reach are medians, and the error is not larger than told."""
  results = [calibration.result(row) for row in calibration.ROWS]
  assert len(results) == 66
  for kind in calibration.KINDS:
    reached = [one.reached for one in results if one.row.kind == kind]
    machine = cost_model.machine(kind)
    assert machine is not None
    assert machine.achieved == pytest.approx(statistics.median(reached), abs=0.005)
  assert statistics.mean(abs(one.error) for one in results) < 0.125
  page = calibration.page(results)
  assert "JaxPP 175B BF16, 64 H100" in page and "mean error" in page
