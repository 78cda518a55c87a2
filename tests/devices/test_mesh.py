# SPDX-License-Identifier: Apache-2.0
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from paxlike.devices import mesh, tpu_targets
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError

SIZES = {"pipeline": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}


@pytest.fixture(scope="module")
def v5e_slices():
  return tpu_targets.devices("v5e", 4, 2)


@pytest.mark.parametrize(
  ("shape", "named"),
  [
    ((2, 3, 4), {"data": 2, "fsdp": 3, "tensor": 4}),
    ((5, 2, 3, 4), {"pipeline": 5, "data": 2, "fsdp": 3, "tensor": 4}),
    ({"tensor": 8}, {"tensor": 8}),
  ],
)
def test_shapes_name_axes(shape, named):
  sizes = mesh.axis_sizes(shape, "ICI_MESH_SHAPE")
  assert sizes == dict.fromkeys(mesh.AXES, 1) | named


@pytest.mark.parametrize(
  ("ici", "dcn", "says"),
  [
    ([3, 1, 1], (1, 1, 1), ["ICI_MESH_SHAPE=[3, 1, 1]", "data 3", "3 devices", "8 devices are"]),
    ([1, 2], (1, 1, 1), ["ICI_MESH_SHAPE", "2 entries"]),
    ({"tensr": 2}, (1, 1, 1), ["'tensr'", "Did you mean tensor?"]),
    ([-1, 1, 1], (-1, 1, 1), ["more than one -1"]),
    ([0, 1, 1], (1, 1, 1), ["data has size 0"]),
    ([-1, 3, 1], (1, 1, 1), ["a multiple of 3 devices"]),
    ([4, 1, 1], (4, 1, 1), ["DCN_MESH_SHAPE=[4, 1, 1]", "16 devices"]),
  ],
)
def test_impossible_meshes_name_the_knob(ici, dcn, says):
  with pytest.raises(UserError) as error:
    MeshSpec(ici=ici, dcn=dcn).build()
  for words in says:
    assert words in str(error.value)


def test_minus_one_fills_and_dcn_multiplies():
  built = MeshSpec(ici=(-1, 2, 1), dcn=(2, 1, 1)).build()
  assert dict(built.shape) == dict.fromkeys(mesh.AXES, 1) | {"data": 4, "fsdp": 2}
  # The two halves of the devices stand for two slices: DCN is the slow part of the data axis.
  first_half = {device.id for device in built.devices[:, :2].flatten()}
  assert first_half == {device.id for device in jax.devices()[:4]}


def test_several_slices_share_the_batch_where_nothing_else_is_said(v5e_slices):
  """Two slices of four chips each; MaxText's default too."""
  for ici, axis in (((-1, 1, 1), "data"), ((1, -1, 1), "fsdp"), ((1, 1, 4), "tensor")):
    shape = dict.fromkeys(mesh.AXES, 1) | {axis: 4}
    shape["data"] *= 2
    built = MeshSpec(ici=ici).build(v5e_slices)
    assert dict(built.shape) == shape
    by_slice = np.split(built.devices, 2, axis=mesh.AXES.index("data"))
    assert [{chip.slice_index for chip in half.flat} for half in by_slice] == [{0}, {1}]
  assert MeshSpec(ici=(1, 4, 1), dcn=(1, 2, 1)).build(v5e_slices).shape["fsdp"] == 8
  with pytest.raises(UserError, match=r"ICI_MESH_SHAPE=\[1, 8, 1\] .* x 2 slices .* 16 devices"):
    MeshSpec(ici=[1, 8, 1]).build(v5e_slices)
  with pytest.raises(UserError, match="the slices have 4, 2 devices"):
    MeshSpec().build(v5e_slices[:6])


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU as JAX describes it: all of a machine have the same slice."""

  id: int
  process_index: int
  slice_index: int
  platform: str = "cuda"
  device_kind: str = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(("outer", "is_of"), [(2, "slice_index"), (4, "process_index")])
def test_the_outer_mesh_of_gpus_is_of_machines_or_of_processes(outer, is_of):
  devices: Any = [Gpu(number, number // 2, number // 4) for number in range(8)]
  grid = mesh._hybrid_grid((1, 1, 1, 8 // outer, 1, 1), (1, outer, 1, 1, 1, 1), devices)
  parts = grid.reshape(outer, -1)
  assert [{getattr(device, is_of) for device in part} for part in parts] == [
    {number} for number in range(outer)
  ]
  with pytest.raises(UserError, match=r"spans 8 slices or processes.* 2 slices and 4 processes"):
    mesh._hybrid_grid((1,) * 6, (1, 8, 1, 1, 1, 1), devices)


def test_a_dim_stays_whole_where_an_axis_does_not_divide_it():
  assert mesh.partition(("vocab", "model"), (50304, 768), SIZES) == PartitionSpec("tensor", "fsdp")
  assert mesh.partition(("vocab", "model"), (50257, 768), SIZES) == PartitionSpec(None, "fsdp")
  assert mesh.partition(("batch",), (4,), SIZES) == PartitionSpec(("data", "fsdp"))
  assert mesh.partition(("batch",), (2,), SIZES) == PartitionSpec("data")


def test_an_axis_shards_a_tensor_once():
  spec = mesh.partition(("heads", "ffn"), (8, 8), SIZES)
  assert spec == PartitionSpec("tensor", None)


def test_batch_arithmetic():
  assert mesh.global_batch_size(percore=4, num_devices=8) == 32
  assert mesh.global_batch_size(percore=0.5, num_devices=8) == 4
  with pytest.raises(UserError, match=r"PERCORE_BATCH_SIZE=4 x 8 devices = 32 is not a multiple"):
    mesh.global_batch_size(percore=4, num_devices=8, accumulation_steps=5)
  with pytest.raises(UserError, match="not a whole number"):
    mesh.global_batch_size(percore=0.3, num_devices=8)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("microbatches", [1, 5])
def test_a_batch_that_cannot_be_cut_names_what_cuts_it_and_nothing_else(
  accumulation_steps, microbatches
):
  built = MeshSpec(ici=(8, 1, 1)).build(jax.devices())
  with pytest.raises(UserError) as error:
    mesh.check_batch(built, 4, accumulation_steps=accumulation_steps, microbatches=microbatches)
  said = str(error.value)
  assert ",," not in said and "ICI_MESH_SHAPE (data x fsdp x expert) splits it into 8" in said
  assert ("GRADIENT_ACCUMULATION_STEPS" in said) == (accumulation_steps > 1)
  assert ("NUM_MICROBATCHES" in said) == (microbatches > 1)
