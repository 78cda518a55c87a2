# SPDX-License-Identifier: Apache-2.0
"""Names and values after a change of layout are tests/checkpoints/test_checkpoint.py's business."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from paxlike.checkpoints import layout_conversion
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.stack_layout import Layout

GOOD = {"scanned": True, "prologue": 0, "pattern": 1, "repeats": 4, "epilogue": 0}
REPEATS, SIZE, WEIGHTS = 4, 1000, 10
LAYOUTS = {scanned: Layout(scanned=scanned, repeats=REPEATS) for scanned in (False, True)}


@pytest.mark.parametrize("scanned", [False, True])
def test_the_state_is_not_held_twice(monkeypatch, scanned):
  where = NamedSharding(MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1]), PartitionSpec())
  target = {
    f"params.stack.layers.{i}.w{k}": jax.ShapeDtypeStruct((SIZE,), jnp.float32, sharding=where)
    for i in range(REPEATS)
    for k in range(WEIGHTS)
  }
  if scanned:
    target = layout_conversion.in_layout(target, LAYOUTS[False], LAYOUTS[True])
  source = layout_conversion.in_layout(target, LAYOUTS[scanned], LAYOUTS[not scanned])
  state = {name: jnp.full(leaf.shape, 3.0, device=where) for name, leaf in source.items()}
  gc.collect()  # What other tests left must not go while this one counts.
  before = sum(x.nbytes for x in jax.live_arrays())
  held = []
  put = jax.device_put

  def observed(*arguments):
    result = put(*arguments)
    held.append(sum(x.nbytes for x in jax.live_arrays()) - before)
    return result

  monkeypatch.setattr(jax, "device_put", observed)
  result = layout_conversion.converted(state, LAYOUTS[not scanned], target, LAYOUTS[scanned])
  assert result.keys() == target.keys()
  for name, leaf in target.items():
    np.testing.assert_array_equal(result[name], np.full(leaf.shape, 3.0))
  one_weight = REPEATS * SIZE * 4
  assert 0 < max(held) <= 2.5 * one_weight < WEIGHTS * one_weight


def test_stages_with_fewer_layers_than_others_are_padded_with_zeros():
  where = NamedSharding(MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1]), PartitionSpec())
  flat = Layout(scanned=False, repeats=5)
  uneven = Layout(scanned=True, repeats=5).in_pipeline(stages=2, chunks=2)
  leaf = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=where)
  unrolled = {f"params.stack.layers.{i}.w": leaf for i in range(5)}
  stacked = layout_conversion.in_layout(unrolled, flat, uneven)
  name = "params.stack.pattern.0.w"
  assert stacked[name].shape == (8, 3)
  state = {f"params.stack.layers.{i}.w": jnp.full(3, i + 1.0) for i in range(5)}
  padded = layout_conversion.converted(dict(state), flat, stacked, uneven)
  # Virtual stages 0, 2 and 1, 3: the first has two layers.
  assert padded[name][:, 0].tolist() == [1, 2, 4, 0, 3, 0, 5, 0]
  back = layout_conversion.converted(dict(padded), uneven, unrolled, flat)
  assert {n: float(x[0]) for n, x in back.items()} == {n: float(x[0]) for n, x in state.items()}
  evenly = layout_conversion.in_layout(unrolled, flat, Layout(scanned=True, repeats=5))
  again = layout_conversion.converted(padded, uneven, evenly, Layout(scanned=True, repeats=5))
  assert again[name][:, 0].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
  ("given", "is_one"),
  [
    ({"stages": 2, "chunks": 2}, True),
    ({"repeats": 0, "prologue": 2}, True),
    ({"stages": 3}, True),
    ({"stages": 8}, False),
    ({"stages": -2, "chunks": -2}, False),
    ({"stages": 0}, False),
    ({"repeats": 0, "stages": 524288}, False),
    ({"repeats": 524288, "stages": 524288}, False),
    ({"pattern": 0}, False),
  ],
)
def test_a_layout_that_no_stack_has_is_refused(given, is_one):
  metadata = {"layout": GOOD | given}
  if is_one:
    assert layout_conversion.layout_in(metadata) == Layout(**metadata["layout"])
  else:
    with pytest.raises(ValueError, match="invalid layout"):
      layout_conversion.layout_in(metadata)
