# SPDX-License-Identifier: Apache-2.0
"""How devices share dropless experts: the tokens, the experts, and the hidden dim of each."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from paxlike.devices import mesh
from paxlike.layers.moe.experts import Experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSharding:
  """What each device has, and what devices send each other in `shard_map`.

  Along the mesh axis `expert`, devices all-gather tokens, apply their own experts and
  reduce-scatter the outputs. Along `tensor`, each computes with its part of the experts' hidden
  dim. The outputs of a token's experts are summed first, and the sums reduce-scattered over
  `tensor`. So each device sends only its columns over `expert`.

  Attributes:
    sizes: Mesh axis -> size, as `mesh.sizes_here` returns it.
    manual: The axes of `shard_map`.
    outputs: The sharding of the outputs [B, T, D].
    splits_experts: Whether a device has a part of the experts.
    splits_hidden: Whether it has a part of the hidden dim.
  """

  sizes: dict[str, int]
  manual: frozenset[str]
  outputs: PartitionSpec
  splits_experts: bool
  splits_hidden: bool

  @classmethod
  def of(cls, experts: Experts, shape: tuple[int, ...], num_experts: int) -> Self | None:
    """Returns how the current mesh shares tokens of `shape` [B, T, D]; None: it shares nothing."""
    tensor = mesh.sizes_here(("tensor",)).get("tensor", 1)
    splits_hidden = tensor > 1 and shape[-1] % tensor == 0 and experts.adds_up(tensor)
    dims = ("batch", "time", "columns") if splits_hidden else ("batch", "time")
    axes = {axis for dim in dims for axis in mesh.RULES[dim]}
    sizes = mesh.sizes_here(axes)
    if not sizes:
      return None
    splits_experts = sizes["expert"] > 1 and num_experts % sizes["expert"] == 0
    outputs = mesh.partition(dims, shape[: len(dims)], sizes)
    # Axes over which tokens are replicated are left to the compiler: `shard_map` would divide the
    # cotangents by their sizes, which would make the amax of gradients wrong.
    replicated = {axis for axis in axes - mesh.axes_of(outputs) if sizes[axis] > 1}
    manual = axes - (replicated - {"expert"} if splits_experts else replicated)
    if not manual:
      return None
    return cls(
      sizes=sizes,
      manual=frozenset(manual),
      outputs=outputs,
      splits_experts=splits_experts,
      splits_hidden=splits_hidden,
    )

  @property
  def tokens(self) -> PartitionSpec:
    """The sharding of the choices [B, T, K]."""
    return PartitionSpec(*self.outputs[:2])

  @property
  def inputs(self) -> PartitionSpec:
    """The sharding of the tokens [B, T, D] before they are gathered."""
    return self.outputs if self._gathers else self.tokens

  @property
  def _gathers(self) -> bool:
    return self.splits_experts and "expert" in mesh.axes_of(self.tokens)

  def of_weights(self, weights: Any) -> Any:
    """Returns the sharding of each of the experts' weights."""
    if not self.splits_hidden:
      return PartitionSpec("expert") if self.splits_experts else PartitionSpec()
    sizes = {axis: n if axis in ("expert", "tensor") else 1 for axis, n in self.sizes.items()}

    def of(weight: Any) -> PartitionSpec:
      shape = weight.get_value().shape
      return mesh.partition(weight.dims[-len(shape) :], shape, sizes)  # Stacks have a dim more.

    return jax.tree.map(of, weights, is_leaf=lambda x: isinstance(x, nnx.Variable))

  def first(self, num_experts: int) -> Any:
    """Returns this device's first of `num_experts` experts."""
    if not self.splits_experts:
      return 0
    return jax.lax.axis_index("expert") * (num_experts // self.sizes["expert"])

  def gathered(
    self, x_BTD: jax.Array, experts_BTK: jax.Array, weights_BTK: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the tokens and choices of all devices along `expert`."""
    given = x_BTD, experts_BTK, weights_BTK
    if not self._gathers:
      return given
    gather = functools.partial(jax.lax.all_gather, axis_name="expert", tiled=True)
    x_BTD, experts_BTK, weights_BTK = map(gather, given)
    if self.splits_hidden:
      x_BTD = jax.lax.all_gather(x_BTD, "tensor", axis=2, tiled=True)
    return x_BTD, experts_BTK, weights_BTK

  def keep_bias_once(self, experts: Experts):
    """Sets the bias of outputs to zeros on all devices along `tensor` but the first."""
    if self.splits_hidden and experts.down.b is not None:
      b = experts.down.b.get_value()
      experts.down.b.set_value(jnp.where(jax.lax.axis_index("tensor") == 0, b, jnp.zeros_like(b)))

  def reduced(self, y_BTD: jax.Array) -> jax.Array:
    """Returns the sum over devices of the outputs, this device's part."""
    if self.splits_hidden:
      y_BTD = jax.lax.psum_scatter(y_BTD, "tensor", scatter_dimension=2, tiled=True)
    if self._gathers:
      return jax.lax.psum_scatter(y_BTD, "expert", tiled=True)
    return jax.lax.psum(y_BTD, "expert") if self.splits_experts else y_BTD
