# SPDX-License-Identifier: Apache-2.0
"""Every mix of parallelisms computes the step of one device: its loss, and its gradients.

The optimizer's epsilon is so large that what two steps change is in proportion to the gradients.
"""

import functools
import math
from typing import Any

import jax
import pytest
from models import adamw, batch
from test_families import shrunk
from test_train_step import assert_same, one_device, steps

from paxlike import mesh, train_state
from paxlike.mesh import MeshSpec

# Sizes of axes, of all that are not named 1. Devices come in neighbouring eights.
MIXES: tuple[dict[str, int], ...] = (
  {"data": 8},
  {"fsdp": 8},
  {"tensor": 4},
  {"context": 8},
  {"data": 2, "fsdp": 4},
  {"data": 4, "tensor": 2},
  {"data": 4, "context": 2},
  {"fsdp": 4, "tensor": 2},
  {"fsdp": 2, "context": 4},
  {"context": 4, "tensor": 2},
  {"data": 2, "fsdp": 2, "tensor": 2},
  {"data": 2, "fsdp": 2, "context": 2},
  {"fsdp": 2, "context": 2, "tensor": 2},
)
EXPERT_MIXES: tuple[dict[str, int], ...] = (
  {"expert": 4},
  {"data": 2, "expert": 4},
  {"fsdp": 2, "expert": 2, "tensor": 2},
  {"expert": 2, "context": 2, "tensor": 2},
  {"data": 2, "fsdp": 2, "expert": 2},
)
DENSE, EXPERTS = ("Synthetic126M", "SyntheticLLaMA70B", "Gemma2_2B"), ("Mixtral8x7B", "DeepSeekV3")
CASES = [(name, mix) for name in DENSE for mix in MIXES]
CASES += [(name, mix) for name in EXPERTS for mix in EXPERT_MIXES]
pytestmark = pytest.mark.slow


def spelt(value: Any) -> str:
  return "_".join(f"{a}{n}" for a, n in value.items()) if isinstance(value, dict) else str(value)


@functools.cache
def expected(name: str, packed: bool = False) -> Any:
  return one_device(shrunk(name), batch(8, packed=packed))


def on(mix: dict[str, int], name: str, *, packed: bool = False, **options: Any) -> Any:
  devices = jax.devices()[: math.prod(mix.values())]
  definition = shrunk(name, scan=True)
  return steps(definition, MeshSpec(ici=mix), batch(8, packed=packed), devices=devices, **options)


@pytest.mark.parametrize(("name", "mix"), CASES, ids=spelt)
def test_any_mix_is_one_device(name, mix):
  assert_same(on(mix, name), expected(name))


@pytest.mark.parametrize("mix", [{"context": 4, "tensor": 2}, {"fsdp": 4, "tensor": 2}], ids=spelt)
def test_documents_of_packed_rows_stay_apart_on_any_mesh(mix):
  name = "SyntheticLLaMA70B"
  assert_same(on(mix, name, packed=True), expected(name, packed=True))


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
  assert mesh.spread(cut, (6, 16), sizes) == jax.sharding.PartitionSpec("fsdp", "data")
  assert mesh.spread(cut, (6, 6), sizes) == jax.sharding.PartitionSpec("fsdp", None)
  assert mesh.spread(cut, (8, 6), sizes) == jax.sharding.PartitionSpec(("fsdp", "data"), None)
