# SPDX-License-Identifier: Apache-2.0

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.saved_arrays import FLAT, arrays, assert_bitwise, save, target_of
from helpers.tiny_model import adamw, batch, place, tiny
from jax.sharding import NamedSharding, PartitionSpec

from paxlike.checkpoints import layout_conversion
from paxlike.checkpoints.array_names import flatten, unflatten
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checkpoints.warm_start import read_found
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers.stack import layout_of
from paxlike.layers.stack_layout import Layout
from paxlike.training import train_state
from paxlike.training.train_step import make_train_step


def test_what_is_saved_comes_back_bitwise(saved):
  save(saved, 5)
  restored = saved.at(5).restore(target_of(arrays()), layout=FLAT)
  assert_bitwise(restored.state, arrays())
  assert restored.train_input == place(5)
  assert saved.path(5).name == "checkpoint_00000005"
  assert {p.name for p in saved.path(5).iterdir()} >= {"state", "metadata", "train_input"}


def test_a_part_can_be_restored(saved):
  save(saved, 1)
  wanted = {"params.a.w": target_of(arrays())["params.a.w"]}
  got = saved.at(1).restore(wanted, layout=FLAT, unread=layout_conversion.anything).state
  assert_bitwise(got, {"params.a.w": arrays()["params.a.w"]})


def test_another_experiment_is_refused_with_the_differences(saved):
  save(saved, 1)
  target = target_of(arrays())
  del target["params.a.w"]
  target["params.new.w"] = jax.ShapeDtypeStruct((2,), jnp.float32)
  target["params.b.w"] = jax.ShapeDtypeStruct((8, 4), jnp.float32)
  target["opt_state.bits"] = jax.ShapeDtypeStruct((6,), jnp.uint32)
  for restore in (
    lambda: saved.at(1).restore(target, layout=FLAT),
    lambda: saved.restore_latest_valid(target, layout=FLAT),
  ):
    with pytest.raises(UserError) as error:
      restore()
    start, _, differences = str(error.value).partition(" is of another experiment: ")
    assert start.endswith("checkpoint_00000001")
    assert differences.split("; ") == [
      "opt_state.bits: uint32[5] in the checkpoint, uint32[6] in this experiment",
      "params.a.w: only in the checkpoint",
      "params.b.w: bfloat16[8, 4] in the checkpoint, float32[8, 4] in this experiment",
      "params.new.w: not in the checkpoint.",
    ]
  assert saved.steps() == [1]


def test_what_layers_noticed_may_be_new_gone_or_of_another_shape(saved):
  save(saved, 1)
  target = target_of(arrays())
  del target["extra.scale"]
  where = target["params.a.w"].sharding
  target["extra.new"] = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=where)
  state = saved.at(1).restore(target, layout=FLAT).state
  assert state.keys() == target.keys()
  np.testing.assert_array_equal(state["extra.new"], np.zeros(3))
  np.testing.assert_array_equal(state["params.a.w"], arrays()["params.a.w"])
  like = target_of(arrays())
  like["extra.scale"] = jax.ShapeDtypeStruct((9,), jnp.float32, sharding=where)
  np.testing.assert_array_equal(saved.at(1).restore(like, layout=FLAT).state["extra.scale"], 0)


def test_what_its_run_removes_while_it_is_read_is_not_damaged(saved):
  for step in (1, 2):
    save(saved, step)

  def read(step):
    if step == 1:
      saved.path(1).rmtree()
      save(saved, 3)
    return saved.at(step).verify()

  with pytest.raises(UserError, match="checkpoint_00000001 was removed while it was being read"):
    read_found(saved, 1, read)

  def read_newest(step):
    if step == 3:
      save(saved, 4)
      saved.path(3).rmtree()
    return saved.at(step).verify()

  assert read_found(saved, None, read_newest)[0] == 4
  largest = max(saved.path(4).glob("state/d/*"), key=lambda path: path.stat().length)
  largest.write_bytes(b"")
  with pytest.raises(UserError, match="checkpoint_00000004 is damaged"):
    read_found(saved, None, lambda step: saved.at(step).verify())


def test_a_folder_may_be_renamed_to_what_looks_like_a_pattern(tmp_path):
  with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
    save(checkpoints, 1)
  (tmp_path / "c").rename(tmp_path / "c[1]")
  renamed = Checkpoints(tmp_path / "c[1]", keep=1)
  assert_bitwise(renamed.at(1).restore(target_of(arrays()), layout=FLAT).state, arrays())
  assert renamed.steps() == [1]


def test_a_stack_in_three_parts_is_converted_both_ways(tmp_path):
  """Layer 0 is the prologue, 1 to 4 a pattern of two blocks twice, 5 the epilogue."""
  scanned = Layout(scanned=True, prologue=1, pattern=2, repeats=2, epilogue=1)
  layers = np.arange(6 * 3, dtype=np.float32).reshape(6, 3)
  prefix = "opt_state.1.mu.stack"
  unrolled = {f"{prefix}.layers.{i}.w": jnp.array(layer) for i, layer in enumerate(layers)}
  stacked = {
    f"{prefix}.prologue.0.w": jnp.array(layers[0]),
    f"{prefix}.pattern.0.w": jnp.array(layers[[1, 3]]),
    f"{prefix}.pattern.1.w": jnp.array(layers[[2, 4]]),
    f"{prefix}.epilogue.0.w": jnp.array(layers[5]),
  }
  flat = Layout(scanned=False, prologue=1, pattern=2, repeats=2, epilogue=1)
  where = NamedSharding(MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1]), PartitionSpec())
  kinds = [(unrolled, flat), (stacked, scanned)]
  for number, ((first, layout), (second, other)) in enumerate([kinds, kinds[::-1]]):
    with Checkpoints(tmp_path / str(number), keep=None) as checkpoints:
      save(checkpoints, 1, first, layout)
      got = checkpoints.at(1).restore(target_of(second, where), layout=other).state
    assert_bitwise(got, second)


def test_flatten_names_every_leaf_and_unflatten_inverts():
  definition = tiny()
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  state = train_state.abstract(definition, adamw(), mesh)
  flat = flatten(state)
  assert "params.stack.layers.1.attention.query.w" in flat
  assert any(name.endswith("mu.stack.layers.1.attention.query.w") for name in flat)
  assert jax.tree.structure(unflatten(state, flat)) == jax.tree.structure(state)
  assert len(flat) == len(jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_restores_onto_another_mesh_and_layout(tmp_path, scan):
  """A trained state, moments and all, moves from 8 devices to one and to the other layout."""
  optimizer = adamw()

  def trained(definition, mesh):
    step = jax.jit(make_train_step(definition, optimizer, seed=0))
    return step(train_state.create(definition, optimizer, mesh, seed=0), batch())[0]

  first, second = tiny(scan=scan, num_layers=3), tiny(scan=not scan, num_layers=3)
  eight = MeshSpec(ici=(2, 2, 2)).build()
  with jax.set_mesh(eight), Checkpoints(tmp_path / "c", keep=None) as checkpoints:
    state = trained(first, eight)
    save(checkpoints, 1, flatten(state), layout_of(first.module))
  one = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  target = train_state.abstract(second, optimizer, one)
  with jax.set_mesh(one), Checkpoints(tmp_path / "c", keep=None) as checkpoints:
    restored = checkpoints.at(1).restore(flatten(target), layout=layout_of(second.module)).state
  assert all(value.sharding.mesh == one for value in restored.values())

  def by_layer(flat, layout):
    result = {}
    for name, value in flat.items():
      location = layout.locate(name)
      for index, layer in enumerate(location.layers if location else (0,)):
        stacked = location is not None and location.stacked
        template = location.template if location else name
        result[template, layer] = np.asarray(value[index] if stacked else value)
    return result

  got = by_layer(restored, layout_of(second.module))
  expected = by_layer(flatten(state), layout_of(first.module))
  assert_bitwise(got, expected)
  where = NamedSharding(one, PartitionSpec())
  assert all(value.sharding.is_equivalent_to(where, value.ndim) for value in restored.values())
