# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers side by side, one for each expert."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxlike import ranges
from paxlike.configurable import configurable
from paxlike.layers import module, sums
from paxlike.layers.grouped_matmul import Groups
from paxlike.layers.mlp import Activation
from paxlike.layers.products import Dot, Placed, Product, Sorted
from paxlike.layers.quantization import Quantized, Storage
from paxlike.layers.rounding import whole


@configurable
class ExpertLinear(module.Module):
  """A linear map for each expert.

  Attributes:
    role: As of `Linear`.
    dtype: As of `Linear`.
  """

  def __init__(
    self,
    num_experts: ranges.Size,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    role: str,
    use_bias: bool = False,
    init: module.Initializer = module.gaussian_fan_in,
    dtype: ranges.ComputeDtype = jnp.float32,
    dot: Callable[[], Dot] | None = None,
    scheme: Callable[..., Quantized] | None = None,
  ):
    """`dot` and `scheme` are as of `Linear`."""
    self.role = role
    self.dtype = dtype
    self.dot = None if dot is None else dot()
    experts = {"experts": num_experts}
    self.w = self.weight(
      {**experts, **inputs, **outputs},
      init=init,
      fan_in=tuple(inputs),
      compute_dtype=dtype,
      storage=None if scheme is None else Storage(scheme, -len(outputs) - 1),
      rounding=None if self.dot is None else self.dot.rounding(len(inputs), len(outputs)),
    )
    (dim,), (output,) = inputs, outputs
    self._dims, self._total = (dim, output), num_experts
    bias = {**experts, **outputs}
    self.b = self.weight(bias, init=module.zeros, compute_dtype=dtype) if use_bias else None

  def sorted(self, x_MD: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns [M, F] for tokens in the order of their experts, `sizes_E` for each."""
    y_MF = self._product(Sorted(Groups(sizes_E, *self._dims, self._total)), x_MD)
    if self.b is not None:
      bias_EF = self.b[...].astype(jnp.float32)  # So are the sums of its gradient.
      bias_MF = jnp.repeat(bias_EF, sizes_E, axis=0, total_repeat_length=len(x_MD))
      y_MF += bias_MF.astype(self.dtype)
    return y_MF

  def placed(self, x_ECD: jax.Array) -> jax.Array:
    """Returns [E, C, F] for C places of each expert."""
    y_ECF = self._product(Placed(), x_ECD)
    return y_ECF if self.b is None else sums.add(y_ECF, self.b[...][:, None])

  def _product(self, product: Product, x: jax.Array) -> jax.Array:
    w, x = self.w.get_value(), x.astype(self.dtype)
    if isinstance(w, Quantized):  # See `Linear`.
      return jax.checkpoint(self._multiply)(product, x, w)
    return self._multiply(product, x, w)

  def _multiply(self, product: Product, x: jax.Array, w: Any) -> jax.Array:
    dense = whole(w, self.dtype)
    if self.dot is None:
      return product.exact(x, dense)
    return self.dot(product, x, dense, self.w.rounding.of(w, dense))

  @property
  def num_experts(self) -> int:
    """How many experts there are, or are here."""
    return len(jax.tree.leaves(self.w.get_value())[0])  # The weight itself, however it is held.


@configurable
class Experts(module.Module):
  """Feed-forward layers, one for each expert: see `Mlp`."""

  def __init__(
    self,
    num_experts: ranges.Size,
    dim: ranges.Size,
    *,
    hidden_dim: ranges.Size,
    up: Callable[..., ExpertLinear],
    down: Callable[..., ExpertLinear],
    gate: Callable[..., ExpertLinear] | None = None,
    activation: Activation,
  ):
    self.activation = activation
    model, ffn = {"model": dim}, {"ffn": hidden_dim}
    self.up = up(num_experts, model, ffn)
    self.gate = None if gate is None else gate(num_experts, model, ffn)
    self.down = down(num_experts, ffn, model)

  def __call__(self, x: jax.Array, apply: Callable[[ExpertLinear, jax.Array], jax.Array]):
    """Returns what the experts make of x; `apply` says which of its rows an expert sees."""
    up = apply(self.up, x)
    if self.gate is None:
      return apply(self.down, self.activation(up))
    return apply(self.down, self.activation(apply(self.gate, x), up))
