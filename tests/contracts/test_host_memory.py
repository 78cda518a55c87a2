# SPDX-License-Identifier: Apache-2.0
"""What JAX means by memories of hosts, and that what we place there is placed there.

Callee: jax/_src/sharding_impls.py, jax/memory (`Space`) and jax.checkpoint_policies of JAX 0.10.2
and 0.12.0.
- A device names its memories (`addressable_memories`): "device", "pinned_host", "unpinned_host", on
  CPUs too. A compile-only TPU has them; a compile-only GPU has none.
- `with_memory_kind(kind)` is *ignored silently* for a device without memories: the kind of the
  result is None, and what is placed so is compiled as living on the device.
- In compiled text S(5) is the memory of the host; `memory_analysis().host_...` counts it.
- Policies that offload take the memories by those names, source first.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import hlo
from helpers.tiny_model import adamw
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlike.devices import topology
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers import Linear
from paxlike.layers.module import Definition
from paxlike.layers.remat import Remat, named
from paxlike.training import train_state


@pytest.fixture(params=["h100-1", "v5e-1"])
def device(request):
  if request.param == "v5e-1":
    pytest.importorskip("libtpu")
  with topology.target(request.param):
    yield topology.devices()[0]


def test_this_machine_names_its_memories():
  kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
  assert {"device", "pinned_host"} <= kinds


@pytest.mark.slow
@pytest.mark.parametrize("remat", [Remat.OFFLOAD_QKV_PROJ, Remat.OFFLOAD_DOT_WITH_NO_BATCH_DIM])
def test_what_a_policy_offloads_is_on_the_host(device, remat):
  def loss(w, x):
    def layer(x, _):
      policy = remat.policy
      y = jax.checkpoint(lambda x: jnp.sin(named(jnp.sin(x @ w) @ w, "query") @ w), policy=policy)
      return y(x), None

    return jax.lax.scan(layer, x, None, length=4)[0].astype(jnp.float32).sum()

  where = NamedSharding(Mesh([device], ("x",)), PartitionSpec())
  w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=where)
  compiled: Any = jax.jit(jax.grad(loss)).lower(w, w).compile()
  held = 4 * 2 * 1024**2  # Of four layers, at least one matrix in bfloat16.
  assert compiled.memory_analysis().host_temp_size_in_bytes >= held
  assert "S(5)" in hlo.text(compiled)


def test_the_optimizers_state_is_on_the_host_or_it_is_refused(device):
  definition = Definition(Linear({"model": 256}, {"ffn": 256}, role="up"))
  mesh = MeshSpec(ici={}).build([device])
  optimizer = dataclasses.replace(adamw(), on_host=True)
  if device.platform != "tpu":
    sharding = NamedSharding(mesh, PartitionSpec())
    assert sharding.with_memory_kind("pinned_host").memory_kind is None  # The premise.
    with pytest.raises(UserError, match="OPTIMIZER_ON_HOST"):
      train_state.abstract(definition, optimizer, mesh)
    return
  state = train_state.abstract(definition, optimizer, mesh)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.shape}
  assert kinds == {"pinned_host"}
