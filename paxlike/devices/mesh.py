# SPDX-License-Identifier: Apache-2.0
"""The device mesh, and the one table that maps the dims of tensors to its axes.

A mesh has six axes, in order from slow to fast interconnect. Each has an ICI size (within NVLink or
a TPU slice) and a DCN size (across slices, or across processes if there are no slices); the size of
an axis is their product.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import topology
from paxlike.errors import UserError, did_you_mean

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")

# Logical dim of a weight or an activation -> the mesh axes that shard it, in order.
RULES: dict[str, tuple[str, ...]] = {
  "batch": ("data", "fsdp", "expert"),
  "time": ("context",),
  "sequence": ("context", "tensor"),
  "layer": ("pipeline",),
  "vocab": ("tensor",),
  "model": ("fsdp",),
  "layer_inputs": ("fsdp",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "ffn": ("tensor",),
  "concat": ("tensor",),
  "columns": ("tensor",),
  "experts": ("expert",),
  "group": ("data", "fsdp"),
  "head": (),
  "layer_input": (),
  "tap": (),
  "rank": (),
  "adapter": (),
  "position": (),
  "history": (),
  "scale": (),
}

Dim = Annotated[str, ranges.OneOf(tuple(RULES))]
MeshShape = Sequence[ranges.AxisSize] | Mapping[str, ranges.AxisSize]
Dims = tuple[str | None, ...]
Device = Any  # jax.Device, which type checkers consider a variable.


def axis_sizes(shape: MeshShape, knob: str) -> dict[str, int]:
  """Returns the size of every axis, given the mesh shape in `knob`.

  3 entries are (data, fsdp, tensor), 4 are (pipeline, data, fsdp, tensor); a mapping names axes.

  Raises:
    UserError: The shape has another length, names an unknown axis, or has a size that is neither
      positive nor -1, which fills an axis with the remaining devices.
  """
  if isinstance(shape, Mapping):
    named: dict[str, int] = dict(shape)
  elif len(shape) == 3:
    named = dict(zip(("data", "fsdp", "tensor"), shape, strict=True))
  elif len(shape) == 4:
    named = dict(zip(("pipeline", "data", "fsdp", "tensor"), shape, strict=True))
  else:
    raise UserError(
      f"{knob}={list(shape)} has {len(shape)} entries: give 3 (data, fsdp, tensor),"
      " 4 (pipeline, data, fsdp, tensor), or a mapping such as {data: 2, fsdp: 4}."
    )
  for axis, size in named.items():
    if axis not in AXES:
      raise UserError(f"{knob} names an unknown axis {axis!r}.{did_you_mean(axis, AXES)}")
    if size != -1 and size < 1:
      raise UserError(f"{knob}: axis {axis} has size {size}; sizes are positive, or -1 to fill.")
  return {axis: named.get(axis, 1) for axis in AXES}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
  """The shape of a mesh, independent of the devices.

  Attributes:
    ici: Sizes within a slice (or process); see `axis_sizes`. One may be -1.
    dcn: Sizes across slices (or processes). One may be -1 if none is in `ici`. If all are 1 and the
      devices are several TPU slices, the axis data spans them.
  """

  ici: MeshShape = (-1, 1, 1)
  dcn: MeshShape = (1, 1, 1)

  def axis(self, name: str) -> int | None:
    """Returns the size of an axis; None if it is given as -1."""
    sizes = (
      axis_sizes(self.ici, "ICI_MESH_SHAPE")[name],
      axis_sizes(self.dcn, "DCN_MESH_SHAPE")[name],
    )
    return None if -1 in sizes else math.prod(sizes)

  @property
  def num_communicators(self) -> int:
    """An estimate of the number of NCCL communicators: one per axis used, and per pair of them."""
    axes = sum(self.axis(name) != 1 for name in AXES)
    return axes * (axes + 1) // 2

  def sizes(
    self, num_devices: int | None, *, slices: int = 1
  ) -> tuple[dict[str, int], dict[str, int]]:
    """Returns (ICI, DCN) sizes by axis for `num_devices`; with None, -1 counts as 1.

    `slices` is the number of TPU slices.

    Raises:
      UserError: The mesh cannot have this many devices.
    """
    ici = axis_sizes(self.ici, "ICI_MESH_SHAPE")
    dcn = axis_sizes(self.dcn, "DCN_MESH_SHAPE")
    if set(dcn.values()) == {1}:
      dcn["data"] = slices
    free = [(sizes, axis) for sizes in (ici, dcn) for axis in AXES if sizes[axis] == -1]
    fixed = math.prod(size for sizes in (ici, dcn) for size in sizes.values() if size != -1)
    if len(free) > 1:
      raise UserError("ICI_MESH_SHAPE and DCN_MESH_SHAPE together hold more than one -1.")
    if num_devices is None:
      num_devices = fixed
    if free and num_devices % fixed == 0:
      sizes, axis = free[0]
      sizes[axis] = num_devices // fixed
    elif free or fixed != num_devices:
      raise UserError(self._mismatch(fixed, bool(free), num_devices, dcn))
    return ici, dcn

  def _mismatch(self, fixed: int, fills: bool, num_devices: int, dcn: dict[str, int]) -> str:
    """Returns the error message for `num_devices` that do not fit the mesh.

    The mesh needs `fixed` devices or, if it `fills` an axis, a multiple of them.
    """

    def spell(shape: MeshShape, knob: str) -> str:
      sizes = axis_sizes(shape, knob)
      written = dict(shape) if isinstance(shape, Mapping) else list(shape)
      shown = [a for a in AXES if sizes[a] != 1] or ["data"]
      return f"{knob}={written} ({', '.join(f'{a} {sizes[a]}' for a in shown)})"

    spelt = spell(self.ici, "ICI_MESH_SHAPE")
    if dcn != axis_sizes(self.dcn, "DCN_MESH_SHAPE") and -1 not in dcn.values():
      spelt += f" x {dcn['data']} slices (DCN_MESH_SHAPE can put other axes across slices)"
    elif math.prod(dcn.values()) != 1:
      spelt += f" x {spell(self.dcn, 'DCN_MESH_SHAPE')}"
    needs = f"a multiple of {fixed} devices" if fills else f"{fixed} device{'s'[: fixed != 1]}"
    found = "1 device is" if num_devices == 1 else f"{num_devices} devices are"
    return (
      f"{spelt} needs {needs}, but {found} available. Axes are (data, fsdp, tensor);"
      " --fdl.ICI_MESH_SHAPE=[-1,1,1] fills an axis with all available devices."
    )

  def build(self, devices: Sequence[Device] | None = None) -> Mesh:
    """Returns the mesh over `devices` (by default all), with ICI neighbours adjacent.

    Raises:
      UserError: The shape does not match the devices, or DCN_MESH_SHAPE the slices or processes.
    """
    devices = list(topology.devices() if devices is None else devices)
    ici, dcn = self.sizes(len(devices), slices=num_slices(devices))
    inner, outer = tuple(ici.values()), tuple(dcn.values())
    if math.prod(outer) == 1:
      grid = mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
    else:
      grid = _hybrid_grid(inner, outer, devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def num_slices(devices: Sequence[Device]) -> int:
  """Returns the number of TPU slices; 1 for other devices."""
  is_tpu = devices[0].platform == "tpu"
  return len({getattr(device, "slice_index", None) for device in devices}) if is_tpu else 1


def _hybrid_grid(
  inner: tuple[int, ...], outer: tuple[int, ...], devices: list[Device]
) -> np.ndarray:
  # The GPUs of a machine have one slice index, and may be of several processes.
  slices = collections.Counter(getattr(device, "slice_index", None) for device in devices)
  processes = collections.Counter(device.process_index for device in devices)
  by_process = len(slices) != math.prod(outer)
  granules = processes if by_process else slices
  if len(granules) == math.prod(outer):
    if len(set(granules.values())) > 1:
      raise UserError(
        f"the {'processes' if by_process else 'slices'} have"
        f" {', '.join(map(str, granules.values()))} devices: a mesh needs the same number in each."
      )
    return mesh_utils.create_hybrid_device_mesh(
      inner, outer, devices, process_is_granule=by_process, allow_split_physical_axes=True
    )
  if devices[0].platform != "cpu":
    raise UserError(
      f"DCN_MESH_SHAPE spans {math.prod(outer)} slices or processes, but there are {len(slices)}"
      f" slices and {len(processes)} processes."
    )
  # Simulated CPU devices have no network: consecutive devices stand for a slice.
  grid = np.array(devices).reshape(outer + inner)
  rank = len(AXES)
  interleaved = [
    axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair
  ]
  return grid.transpose(interleaved).reshape([o * i for o, i in zip(outer, inner, strict=True)])


def partition(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
  """Returns the PartitionSpec of a tensor of `shape` on a mesh with axis `sizes`.

  A dim is not sharded over an axis that does not divide it (vocabulary 50257 over tensor 2), or
  that already shards an earlier dim of the same tensor.
  """
  used: set[str] = set()
  entries: list[str | tuple[str, ...] | None] = []
  for dim, size in zip(dims, shape, strict=True):
    axes: list[str] = []
    for axis in RULES[dim] if dim is not None else ():
      shards = math.prod(sizes[a] for a in axes) * sizes[axis]
      if sizes[axis] > 1 and axis not in used and size % shards == 0:
        axes.append(axis)
        used.add(axis)
    entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
  return PartitionSpec(*entries)


def shard_over_data(
  spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]
) -> PartitionSpec:
  """Returns `spec` with the axis `data` added to the first dim that it divides (ZeRO-1)."""
  if sizes["data"] == 1 or "data" in axes_of(spec):
    return spec
  entries = axes_by_dim(spec)
  for place, (axes, size) in enumerate(zip(entries, shape, strict=True)):
    if size % (math.prod(sizes[axis] for axis in axes) * sizes["data"]) == 0:
      entries[place] = (*axes, "data")
      break
  return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def axes_of(spec: PartitionSpec) -> set[str]:
  """Returns the mesh axes that a PartitionSpec uses."""
  return {axis for axes in axes_by_dim(spec) for axis in axes}


def axes_by_dim(spec: PartitionSpec) -> list[tuple[str, ...]]:
  """Returns the mesh axes that shard each dim."""
  return [(entry,) if isinstance(entry, str) else entry or () for entry in spec]


def sharding(mesh: Mesh | AbstractMesh, dims: Dims, shape: Sequence[int]) -> NamedSharding:
  """Returns the sharding on `mesh` of a tensor with these dims."""
  return NamedSharding(mesh, partition(dims, shape, mesh.shape))


def constrain(x: jax.Array, *dims: str | None) -> jax.Array:
  """Constrains an activation to the sharding of its dims on the current mesh, if there is one."""
  if sizes := sizes_here(AXES):
    return jax.lax.with_sharding_constraint(x, partition(dims, x.shape, sizes))
  return x


def sizes_here(axes: Collection[str]) -> dict[str, int]:
  """Returns axis -> size of the current mesh; {} if there is none, or all of `axes` have size 1.

  Axes that are manual, such as `pipeline` inside a stage, are returned with size 1.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return {}
  sizes = {axis: 1 if axis in mesh.manual_axes else size for axis, size in mesh.shape.items()}
  return sizes if any(mesh.shape[axis] > 1 for axis in axes) else {}


def axes_left() -> Set[str]:
  """Returns the axes that are not manual in the current `shard_map`."""
  return set(AXES).difference(jax.sharding.get_abstract_mesh().manual_axes)


def on_each_device(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
  """Returns `shard_map` of a function over all axes that are not manual yet.

  Axes of size 1 are included, because custom kernels are rejected while any axis is automatic, and
  XLA aborts on gathers in a partially manual `shard_map`.
  """
  return jax.shard_map(
    function, in_specs=in_specs, out_specs=out_specs, axis_names=axes_left(), check_vma=False
  )


def in_stage() -> bool:
  """Returns whether the code is traced inside a pipeline stage."""
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.empty and "pipeline" in mesh.manual_axes


def is_sharded(dim: str) -> bool:
  """Returns whether the current mesh shards activations along `dim`; manual axes do not count."""
  return any(sizes_here(AXES).get(axis, 1) > 1 for axis in RULES[dim])


def global_batch_size(*, percore: float, num_devices: int, accumulation_steps: int = 1) -> int:
  """Returns the number of sequences of one optimizer step over all devices, for any mesh.

  Args:
    percore: PERCORE_BATCH_SIZE; less than 1 if devices share a sequence (tensor parallelism).
    num_devices: The number of devices of all processes.
    accumulation_steps: The number of gradient-accumulation microbatches.

  Raises:
    UserError: That is not a whole number, or not a multiple of the microbatches.
  """
  batch = percore * num_devices
  size = round(batch)
  arithmetic = f"PERCORE_BATCH_SIZE={percore:g} x {num_devices} devices = {batch:g}"
  if size < 1 or abs(batch - size) > 1e-6:
    raise UserError(f"{arithmetic} is not a whole number of sequences.")
  if size % accumulation_steps:
    raise UserError(
      f"{arithmetic} is not a multiple of GRADIENT_ACCUMULATION_STEPS={accumulation_steps}."
    )
  return size


def batch_shards(mesh: Mesh) -> int:
  """Returns the number of shards of a batch."""
  return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def check_batch(mesh: Mesh, size: int, *, accumulation_steps: int = 1, microbatches: int = 1):
  """Checks that shards and microbatches divide a batch of `size` sequences.

  Raises:
    UserError: They do not.
  """
  shards = batch_shards(mesh)
  parts = shards * accumulation_steps * microbatches
  if size % parts:
    factors = {
      "ICI_MESH_SHAPE (data x fsdp x expert)": shards,
      "GRADIENT_ACCUMULATION_STEPS": accumulation_steps,
      "NUM_MICROBATCHES": microbatches,
    }
    factors = {knob: count for knob, count in factors.items() if count > 1}
    raise UserError(
      f"a global batch of {size} sequences does not divide into {parts} parts:"
      f" {', '.join(f'{knob} splits it into {count}' for knob, count in factors.items())}. Change"
      f" {'one of these' if len(factors) > 1 else 'this'}, or PERCORE_BATCH_SIZE."
    )
