# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest
from helpers import hlo

from paxlike.devices.mesh import MeshSpec
from paxlike.layers.attention import kernels
from paxlike.layers.attention.cache import KvCache, LatentCache, positions_in


def test_a_cpu_does_not_convert_a_cache_to_write_to_it():
  new, positions = jnp.ones((8, 1, 2, 4), jnp.bfloat16), jnp.arange(8)[:, None]
  cache = KvCache.empty(8, 16, 2, 4, 4, jnp.bfloat16)
  program = hlo.text(lambda cache, *x: cache.write(*x), cache, new, new, positions)
  converts = [one for one in hlo.instructions(program) if one.operation == "convert"]
  assert not [one for one in converts if one.outputs[0].dims == cache.k_BKHS.shape]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_cpu_writes_a_token_in_place(batch):
  def decode(cache, x_B1KH, position_B1):
    def step(carry, _):
      cache, x_B1KH, position_B1 = carry
      cache = cache.write(x_B1KH, x_B1KH, position_B1)
      visible_BS = positions_in(cache.num_slots, position_B1) >= 0
      y_BKH = kernels.cached(x_B1KH[:, 0], cache.k_BKHS, cache.v_BKSH, visible_BS, scale=1.0)
      return (cache, y_BKH[:, None], position_B1 + 1), None

    return jax.lax.scan(step, (cache, x_B1KH, position_B1), length=3)[0]

  cache = KvCache.empty(batch, 16, 2, 4, 4, jnp.float32)
  given = cache, jnp.ones((batch, 1, 2, 4)), jnp.zeros((batch, 1), jnp.int32)
  program = hlo.text(jax.jit(decode, donate_argnums=0).lower(*given))
  copies = [one for one in hlo.instructions(program) if one.operation == "copy"]
  assert not [
    one for one in copies if one.outputs[0].dims in (cache.k_BKHS.shape, cache.v_BKSH.shape)
  ]


@pytest.mark.parametrize("kind", [KvCache, LatentCache])
def test_a_sharded_batch_is_written_where_it_is(kind):
  devices = MeshSpec(ici=(2, 2, 2)).build()
  with jax.set_mesh(devices):
    sharding = jax.NamedSharding(devices, jax.P(("data", "fsdp")))
    new, positions = jnp.ones((8, 1, 2, 4)), jnp.arange(8)[:, None]
    if kind is KvCache:
      given = (KvCache.empty(8, 16, 2, 4, 4, jnp.float32), new, new, positions)
    else:
      given = (LatentCache.empty(8, 16, 4, jnp.float32), new[:, :, 0], positions)
    program = hlo.text(lambda cache, *x: cache.write(*x), *jax.device_put(given, sharding))
  assert not hlo.collectives(program)
