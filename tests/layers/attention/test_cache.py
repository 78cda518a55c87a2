# SPDX-License-Identifier: Apache-2.0
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_cpu_writes_a_token_of_each_device_in_place(num_devices):
  def decode(cache, x_B1KH, position_B1):
    def step(carry, _):
      cache, x_B1KH, position_B1 = carry
      cache = cache.write(x_B1KH, x_B1KH, position_B1)
      visible_BS = positions_in(cache.num_slots, position_B1) >= 0
      y_BKH = kernels.cached(x_B1KH[:, 0], cache.k_BKHS, cache.v_BKSH, visible_BS, scale=1.0)
      return (cache, y_BKH[:, None], position_B1 + 1), None

    return jax.lax.scan(step, (cache, x_B1KH, position_B1), length=3)[0]

  devices = MeshSpec(ici=(num_devices, 1, 1)).build(jax.devices()[:num_devices])
  with jax.set_mesh(devices):
    cache = KvCache.empty(num_devices, 16, 2, 4, 4, jnp.float32)
    given = cache, jnp.ones((num_devices, 1, 2, 4)), jnp.zeros((num_devices, 1), jnp.int32)
    given = jax.device_put(given, jax.NamedSharding(devices, jax.P("data")))
    program = hlo.text(jax.jit(decode, donate_argnums=0).lower(*given))
  copies = {one.outputs[0].dims for one in hlo.instructions(program) if one.operation == "copy"}
  assert not copies & {(1, 2, 4, 16), (1, 2, 16, 4)}


@pytest.mark.parametrize("kind", [KvCache, LatentCache])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_token_goes_to_the_slot_of_its_position_and_padding_nowhere(kind, batch):
  latent = kind is LatentCache
  old: Any = (
    LatentCache.empty(batch, 8, 3, float) if latent else KvCache.empty(batch, 8, 2, 3, 3, float)
  )
  for position in (0, 7, 8, 21, -1):
    positions_B1 = jnp.full((batch, 1), position)
    new = jnp.arange(batch * 6.0).reshape(batch, 1, 2, 3) + 1
    written = old.write(*([new[:, :, 0]] if latent else [new, -new]), positions_B1)
    arrays = jax.tree.leaves(written)
    expected = [np.zeros(array.shape) for array in arrays]
    if position >= 0:
      slot = position % 8
      if latent:
        expected[0][:, :, slot] = new[:, 0, 0]
      else:
        expected[0][..., slot], expected[1][:, :, slot] = new[:, 0], -new[:, 0]
    for array, wanted in zip(arrays, expected, strict=True):
      np.testing.assert_array_equal(array, wanted)


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
