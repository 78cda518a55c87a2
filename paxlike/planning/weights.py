# SPDX-License-Identifier: Apache-2.0
"""The weights of a model, as inputs of the cost and memory models."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlike.checkpoints.layout_conversion import MTP
from paxlike.devices import mesh
from paxlike.layers.module import Definition, Matmul, WeightSpec
from paxlike.layers.stack import layout_of
from paxlike.layers.stack_layout import Location

# The dims that tensor parallelism shards.
_TENSOR_DIMS = {dim for dim, axes in mesh.RULES.items() if "tensor" in axes}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # Hashed often: by identity.
class Weight:
  """A weight, or the stacked weights of all repeats of a layer.

  Attributes:
    dims: Names of its dims, keys of `mesh.RULES`.
    shape: Their sizes.
    layers: The number of repeats stacked in it; 0: outside of the stack, -1: of a single layer.
    inputs, outputs, share: See `module.Matmul`; 0 if it has none.
    flops: Forward FLOPs per token over all its layers.
    held: Bytes per number in storage.
    computed: Bytes per number in the compute dtype.
    trained: Whether the optimizer trains it.
    operands: The format of the operands of its matmuls, "fp8" or "int8"; None: the compute dtype.
    role: The role by which remat policies save its output; empty: none.
  """

  dims: tuple[str, ...]
  shape: tuple[int, ...]
  layers: int = 0
  inputs: int = 0
  outputs: int = 0
  share: float = 0.0
  flops: float = 0.0
  held: float = 4
  computed: int = 2
  trained: bool = True
  operands: str | None = None
  role: str = ""

  @property
  def size(self) -> int:
    """Its number of elements."""
    return math.prod(self.shape)

  @property
  def is_last(self) -> bool:
    """Whether its output only goes into a residual sum, so that remat need not recompute it."""
    return self.role == "down"

  @property
  def splits_outputs(self) -> bool:
    """Whether `tensor` splits the outputs of its matmul, and not the inputs."""
    # A last dim that tensor shards, "head" after "heads", or the vocabulary of a tied embedding.
    return self.dims[-1] in (*_TENSOR_DIMS, "head") or self.dims[0] == "vocab"

  @property
  def is_routed(self) -> bool:
    """Whether it is a matrix of routed experts."""
    return bool(self.share) and "experts" in self.dims and self.dims[-1] != "experts"

  def axes(self, sizes: Mapping[str, int]) -> set[str]:
    """Returns the axes that shard it on a mesh with these axis `sizes`."""
    return _axes(self, tuple(sizes.items()))

  def per_device(self, sizes: Mapping[str, int], *without: str) -> int:
    """Returns its number of elements per device, all-gathered over the axes `without`."""
    return _per_device(self, tuple(sizes.items()), without)


_Sizes = tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=1 << 16)
def _axes(weight: Weight, sizes: _Sizes) -> set[str]:
  return mesh.axes_of(mesh.partition(weight.dims, weight.shape, dict(sizes)))


@functools.lru_cache(maxsize=1 << 16)
def _per_device(weight: Weight, sizes: _Sizes, without: tuple[str, ...]) -> int:
  axes = _axes(weight, sizes).difference(without)
  return weight.size // math.prod(size for axis, size in sizes if axis in axes)


def of_definition(definition: Definition) -> tuple[Weight, ...]:
  """Returns the weights of a model."""
  layout = layout_of(definition.module)
  return tuple(_weight(n, spec, layout.locate(n)) for n, spec in definition.weights.items())


def _weight(name: str, spec: WeightSpec, location: Location | None) -> Weight:
  matmul = spec.matmul or Matmul(inputs=0, outputs=0, share=0.0)
  layers = -1 if name.startswith(MTP) else 0
  if location is not None:
    layers = len(location.layers) if location.stacked else -1
  held = spec.abstract
  nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
  return Weight(
    dims=spec.dims,
    shape=spec.shape,
    layers=layers,
    inputs=matmul.inputs,
    outputs=matmul.outputs,
    share=matmul.share,
    flops=spec.flops,
    held=nbytes / math.prod(spec.shape),
    computed=jnp.dtype(spec.compute_dtype).itemsize,
    trained=spec.trained,
    operands=matmul.operands,
    role=matmul.role,
  )
