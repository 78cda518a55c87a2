# SPDX-License-Identifier: Apache-2.0
"""Every mix of parallelisms computes the step of one device: its loss, and its gradients.

The optimizer's epsilon is so large that what two steps change is in proportion to the gradients.
"""

import functools
import math
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import pytest
from helpers.shrunk import shrunk
from helpers.steps import assert_same, distance, one_device, steps
from helpers.tiny_model import adamw, batch, tiny

from paxlike.devices import mesh
from paxlike.devices.mesh import MeshSpec
from paxlike.layers import DelayedFp8, Pipeline
from paxlike.layers.stack import layout_of
from paxlike.training import train_state

# Sizes of axes, of all that are not named 1. Devices come in neighbouring eights.
MIXES: tuple[dict[str, int], ...] = (
  {"data": 8},
  {"fsdp": 8},
  {"tensor": 4},
  {"context": 8},
  {"data": 2, "fsdp": 2, "tensor": 2},
  {"data": 2, "fsdp": 2, "context": 2},
  {"fsdp": 2, "context": 2, "tensor": 2},
)
EXPERT_MIXES: tuple[dict[str, int], ...] = (
  {"data": 2, "expert": 4},
  {"expert": 2, "context": 2, "tensor": 2},
)
# The other families are tried on one mix in experiments/test_families.py.
CASES = [("Synthetic126M", mix) for mix in MIXES]
CASES += [("Gemma2_2B", {"fsdp": 2, "context": 2, "tensor": 2})]
CASES += [("DeepSeekV3", mix) for mix in EXPERT_MIXES]

# Model, schedule, groups of layers that a stage holds, axes; all in four microbatches.
PIPELINES: tuple[tuple[str, str, int, dict[str, int]], ...] = (
  ("Synthetic126M", "gpipe", 1, {"pipeline": 4}),
  ("Synthetic126M", "1f1b", 1, {"pipeline": 4, "data": 2}),
  ("SyntheticLLaMA70B", "gpipe", 1, {"pipeline": 2, "fsdp": 2, "tensor": 2}),
  ("SyntheticLLaMA70B", "circular", 2, {"pipeline": 2, "context": 2, "tensor": 2}),
  ("SyntheticLLaMA70B", "interleaved_1f1b", 2, {"pipeline": 2, "fsdp": 2, "tensor": 2}),
  ("SyntheticGLaM126M64E", "circular", 2, {"pipeline": 2, "expert": 2, "tensor": 2}),
)
pytestmark = pytest.mark.slow


def spelt(value: Any) -> str:
  return "_".join(f"{a}{n}" for a, n in value.items()) if isinstance(value, dict) else str(value)


@functools.cache
def expected(name: str, packed: bool = False) -> Any:
  return one_device(shrunk(name, scan=True), batch(8, packed=packed))


def on(mix: dict[str, int], name: str, *, packed: bool = False, **options: Any) -> Any:
  devices = jax.devices()[: math.prod(mix.values())]
  definition = shrunk(name, scan=True)
  return steps(definition, MeshSpec(ici=mix), batch(8, packed=packed), devices=devices, **options)


@pytest.mark.parametrize(("name", "mix"), CASES, ids=spelt)
def test_any_mix_is_one_device(name, mix):
  assert_same(on(mix, name), expected(name))


@pytest.mark.parametrize(
  ("name", "dispatch", "factor"),
  [
    ("DeepSeekV3", "dropless", 4.0),
    ("DeepSeekV3", "capacity", 4.0),
    ("SyntheticGLaM126M64E", "capacity", 2.0),
  ],
)
def test_experts_for_one_sequence_per_device_are_those_of_one_device(name, dispatch, factor):
  """XLA sums a matmul wrongly whose output is to be in columns."""
  knobs = {"MOE_DISPATCH": dispatch, "CAPACITY_FACTOR": factor, "INIT_STD": 0.3}
  definition = shrunk(name, scan=True, repeats=2, **knobs)
  got = steps(definition, MeshSpec(ici={"data": 2, "fsdp": 2, "tensor": 2}), batch(4))
  assert_same(got, one_device(definition, batch(4)))


@pytest.mark.parametrize("mix", [{"context": 4, "tensor": 2}, {"fsdp": 4, "tensor": 2}], ids=spelt)
def test_documents_of_packed_rows_stay_apart_on_any_mesh(mix):
  name = "SyntheticLLaMA70B"
  assert_same(on(mix, name, packed=True), expected(name, packed=True))


def pipelined(schedule: str, chunks: int, stages: int, **options: Any) -> fdl.Config[Pipeline]:
  settings = {"stages": stages, "chunks": chunks, "microbatches": 4} | options
  return fdl.Config(Pipeline, schedule=schedule, **settings)


@functools.cache
def in_four_parts(name: str, packed: bool = False, repeats: int = 4, **knobs: Any) -> Any:
  data = batch(16, packed=packed)
  definition = shrunk(name, scan=True, repeats=repeats, **knobs)
  return one_device(definition, data, num_microbatches=4)


def through_stages(
  name: str, schedule: str, chunks: int, mix: dict[str, int], **options: Any
) -> Any:
  packed, knobs = options.pop("packed", False), options.pop("knobs", {})
  repeats = options.pop("repeats", 4)
  pipeline = pipelined(schedule, chunks, mix["pipeline"], **options)
  definition = shrunk(name, repeats=repeats, pipeline=pipeline, **knobs)
  devices = jax.devices()[: math.prod(mix.values())]
  return steps(definition, MeshSpec(ici=mix), batch(16, packed=packed), devices=devices)


@pytest.mark.parametrize(("name", "schedule", "chunks", "mix"), PIPELINES, ids=spelt)
def test_any_pipeline_is_one_device(name, schedule, chunks, mix):
  assert_same(through_stages(name, schedule, chunks, mix), in_four_parts(name))


# The same with repeats that the stages do not divide: some have one less than others.
UNEVEN: tuple[tuple[str, str, int, int, dict[str, int], dict[str, Any]], ...] = (
  ("Synthetic126M", "1f1b", 1, 5, {"pipeline": 4, "data": 2}, {}),
  ("SyntheticLLaMA70B", "1f1b", 1, 3, {"pipeline": 2, "data": 2}, {"knobs": {"USE_LORA": True}}),
  ("Mixtral8x7B", "interleaved_1f1b", 2, 5, {"pipeline": 2, "expert": 4}, {"recompute": False}),
  ("Gemma2_2B", "circular", 2, 7, {"pipeline": 2, "fsdp": 2}, {}),
)


@pytest.mark.parametrize(
  ("name", "schedule", "chunks", "repeats", "mix", "options"), UNEVEN, ids=spelt
)
def test_stages_with_fewer_layers_than_others_are_one_device(
  name, schedule, chunks, repeats, mix, options
):
  got = through_stages(name, schedule, chunks, mix, repeats=repeats, **options)
  assert_same(got, in_four_parts(name, repeats=repeats, **options.get("knobs", {})))
  # The last of the last stage is padding, and zero from the first step to the last.
  state = jax.device_get(got[2])
  stacked = [w for name, w in state.weights.items() if ".pattern." in name]
  assert stacked and not any(w[-1].any() for w in stacked)


@pytest.mark.parametrize(
  ("schedule", "chunks", "remat"),
  [("gpipe", 1, "SAVE_EVERYTHING"), ("interleaved_1f1b", 2, "SAVE_NOTHING")],
)
def test_stages_may_store_what_remat_saves(schedule, chunks, remat):
  name, mix = "SyntheticLLaMA70B", {"pipeline": 2, "fsdp": 2, "tensor": 2}
  knobs = {"remat": remat}
  got = through_stages(name, schedule, chunks, mix, recompute=False, knobs=knobs)
  assert_same(got, in_four_parts(name))


@pytest.mark.parametrize(
  "knobs",
  [
    {"USE_LORA": True, "LORA_BASE_QUANTIZATION": "nf4"},
    {"DROPOUT_PROB": 0.1, "EMBEDDING_DROPOUT_PROB": 0.1},
  ],
  ids=spelt,
)
def test_adapters_and_dropout_go_through_a_pipeline(knobs):
  name, mix = "SyntheticLLaMA70B", {"pipeline": 2, "data": 2}
  got = through_stages(name, "1f1b", 1, mix, knobs=knobs)
  assert_same(got, in_four_parts(name, **knobs))


def test_delayed_scales_go_through_a_pipeline_with_experts():
  name, mix = "Mixtral8x7B", {"pipeline": 2, "data": 2, "expert": 2}
  knobs = {"QUANTIZATION": "fp8_delayed"}
  got = through_stages(name, "1f1b", 1, mix, knobs=knobs)
  assert_same(got, in_four_parts(name, **knobs))


def test_int8_goes_through_a_pipeline_as_near():
  """As sums in another order round the other way, chance draws anew."""
  name, mix = "SyntheticLLaMA70B", {"pipeline": 2, "data": 2}
  got = through_stages(name, "1f1b", 1, mix, knobs={"QUANTIZATION": "int8"})
  exact, rounded = in_four_parts(name), in_four_parts(name, QUANTIZATION="int8")
  assert 0 < distance(got, rounded) < 1.5 * distance(rounded, exact)


def test_layers_after_a_pipeline_notice_what_they_are_given():
  """What all stages compute of an epilogue, only the last has seen."""
  model = functools.partial(tiny, ends=True, scan=True)
  staged = model(dot=DelayedFp8, pipeline=fdl.build(pipelined("1f1b", 1, 2)))
  assert layout_of(staged.module).epilogue == 1
  got = steps(staged, MeshSpec(ici={"pipeline": 2}), batch(8), devices=jax.devices()[:2])
  expected = one_device(model(dot=DelayedFp8), batch(8), num_microbatches=4)
  exact = one_device(model(), batch(8), num_microbatches=4)
  # A sum in another order rounds some number the other way, which no later layer corrects.
  assert distance(got, expected) < 0.05 * distance(expected, exact)
  for key, value in expected[2].extra.items():
    np.testing.assert_allclose(got[2].extra[key], value, rtol=1e-3, atol=1e-5, err_msg=key)


SEQUENCES: tuple[dict[str, int], ...] = (
  {"context": 8},
  {"fsdp": 2, "context": 2, "tensor": 2},
)


@pytest.mark.parametrize(
  ("kernel", "mix"), [("gathered", SEQUENCES[-1]), *(("ring", mix) for mix in SEQUENCES)], ids=spelt
)
def test_devices_that_share_sequences_are_one_device(kernel, mix):
  name = "SyntheticLLaMA70B"
  definition = shrunk(name, scan=True, ATTENTION_KERNEL=kernel, ICI_MESH_SHAPE=mix)
  got = steps(definition, MeshSpec(ici=mix), batch(8, packed=True), devices=jax.devices())
  assert_same(got, expected(name, packed=True))


@pytest.mark.parametrize("kernel", ["ring", "gathered"])
def test_stages_share_sequences(kernel):
  name, mix = "SyntheticLLaMA70B", {"pipeline": 2, "context": 4}
  knobs = {"ATTENTION_KERNEL": kernel, "ICI_MESH_SHAPE": {"context": -1}}
  got = through_stages(name, "1f1b", 1, mix, knobs=knobs)
  assert_same(got, in_four_parts(name))


@pytest.mark.parametrize(
  ("name", "mix"),
  [
    ("SyntheticLLaMA70B", {"fsdp": 2, "tensor": 4}),
    ("Gemma2_2B", {"data": 2, "context": 2, "tensor": 2}),
    ("Mixtral8x7B", {"expert": 2, "tensor": 4}),
  ],
  ids=spelt,
)
def test_sequences_cut_over_tensor_are_one_device(name, mix):
  definition = shrunk(name, scan=True, SHARD_SEQUENCE_OVER_TENSOR=True)
  got = steps(definition, MeshSpec(ici=mix), batch(8), devices=jax.devices())
  assert_same(got, expected(name))


def test_stages_shard_sequences_over_tensor():
  name, mix = "SyntheticLLaMA70B", {"pipeline": 2, "tensor": 4}
  got = through_stages(name, "1f1b", 1, mix, knobs={"SHARD_SEQUENCE_OVER_TENSOR": True})
  assert_same(got, in_four_parts(name))


def test_slices_are_as_one_mesh():
  spec = MeshSpec(ici={"fsdp": 2, "tensor": 2}, dcn={"data": 2})
  got = steps(shrunk("SyntheticLLaMA70B", scan=True), spec, batch(8))
  assert_same(got, expected("SyntheticLLaMA70B"))


@pytest.mark.parametrize(
  "mix", [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=spelt
)
def test_an_optimizer_cut_over_data_is_the_same_in_less_memory(mix):
  name = "SyntheticLLaMA70B"
  got = on(mix, name, optimizer=adamw(over_data=True))
  assert_same(got, expected(name))
  definition, built = shrunk(name, scan=True), MeshSpec(ici=mix).build()
  held = {}
  for over_data in (False, True):
    target = train_state.abstract(definition, adamw(over_data=over_data), built)
    leaves = jax.tree.leaves(target.opt_state)
    held[over_data] = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
    if over_data:  # And it stays there.
      where = jax.tree.map(lambda x: x.sharding, target)
      is_there = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), got[2], where)
      assert all(jax.tree.leaves(is_there))
  assert held[True] < 1.1 * held[False] / mix["data"]


def test_a_dim_that_data_does_not_divide_is_passed_over():
  sizes = dict.fromkeys(mesh.AXES, 1) | {"data": 4, "fsdp": 2}
  cut = mesh.partition(("model", "ffn"), (6, 16), sizes)
  assert mesh.shard_over_data(cut, (6, 16), sizes) == jax.sharding.PartitionSpec("fsdp", "data")
  assert mesh.shard_over_data(cut, (6, 6), sizes) == jax.sharding.PartitionSpec("fsdp", None)
  assert mesh.shard_over_data(cut, (8, 6), sizes) == jax.sharding.PartitionSpec(
    ("fsdp", "data"), None
  )


def further(kind: str) -> dict[str, Any]:
  return {"MTP_NUM_LAYERS": 2, "MTP_KIND": kind, "MTP_LOSS_SCALING_FACTOR": 0.5}


def test_tokens_after_the_next_one_are_predicted_alike_on_a_mesh():
  definition = shrunk("SyntheticLLaMA70B", scan=True, **further("sequential"))
  spec, data = MeshSpec(ici={"fsdp": 2, "context": 2, "tensor": 2}), batch(8, packed=True)
  got = steps(definition, spec, data, devices=jax.devices())
  assert_same(got, one_device(definition, data))


@pytest.mark.parametrize(
  ("name", "kind", "schedule", "chunks", "mix"),
  [
    ("SyntheticLLaMA70B", "parallel", "interleaved_1f1b", 2, {"pipeline": 2, "tensor": 2}),
    ("DeepSeekV3", "sequential", "1f1b", 1, {"pipeline": 2, "fsdp": 2, "expert": 2}),
  ],
  ids=spelt,
)
def test_tokens_after_the_next_one_are_predicted_alike_in_a_pipeline(
  name, kind, schedule, chunks, mix
):
  knobs = further(kind)
  if name == "DeepSeekV3":  # Its experts have both: a bias that follows the load, and a loss.
    knobs |= {"BALANCE_LOSS_WEIGHT": 0.1, "MTP_NUM_LAYERS": 1}
  got = through_stages(name, schedule, chunks, mix, packed=True, knobs=knobs)
  assert_same(got, in_four_parts(name, packed=True, **knobs))
