# SPDX-License-Identifier: Apache-2.0
"""Batched feed-forward layers, one per expert."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers import module
from paxlike.layers.activations import Activation, activate, is_elementwise
from paxlike.layers.lora import ExpertLora
from paxlike.layers.moe.grouped_matmul import GroupedForm
from paxlike.layers.precision import cpu_dots, float32_sums
from paxlike.layers.precision.matmul import Dot, by_form
from paxlike.layers.precision.weight_only import Quantized, WeightQuantizer


class BatchedForm(NamedTuple):
  """The `MatmulForm` for tokens in C capacity slots per expert: x [E, C, D] times w [E, D, F]."""

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return _batched_dot(x, w, -2, dtype)

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return _batched_dot(dy, w, -1, dtype)

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    if cpu_dots.on_cpu():
      return cpu_dots.dot(cpu_dots.transposed(x), dy, -2, dtype=dtype)
    return jnp.einsum("ECD,ECF->EDF", x, dy, preferred_element_type=dtype)

  def broadcast_scale(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    return scale


def _batched_dot(x: jax.Array, w: jax.Array, axis: int, dtype: Any) -> jax.Array:
  """Returns x [E, C, K] times w, which is contracted over its `axis`, -2 or -1."""
  if cpu_dots.on_cpu():
    return cpu_dots.dot(x, w, axis, dtype=dtype)
  of_w = "EKF" if axis == -2 else "EFK"
  return jnp.einsum(f"ECK,{of_w}->ECF", x, w, preferred_element_type=dtype)


@configurable
class ExpertLinear(module.Module):
  """A linear map per expert.

  Attributes:
    role: See `Linear`.
    dtype: See `Linear`.
  """

  def __init__(
    self,
    num_experts: ranges.Size,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    num_chosen: ranges.Size,
    *,
    role: str,
    use_bias: bool = False,
    init: module.Initializer = module.gaussian_fan_in,
    dtype: ranges.ComputeDtype = jnp.float32,
    dot: Callable[[], Dot] | None = None,
    lora: Callable[..., ExpertLora] | None = None,
    scheme: Callable[..., Quantized] | None = None,
  ):
    """`num_chosen` is top-k; for `dot`, `lora` and `scheme` see `Linear`."""
    self.role = role
    self.dtype = dtype
    self.dot = None if dot is None else dot()
    operands = None if self.dot is None else self.dot.operands
    experts = {"experts": num_experts}
    sizes = (num_chosen * math.prod(dims.values()) for dims in (inputs, outputs))
    self.w = self.weight(
      {**experts, **inputs, **outputs},
      init=init,
      fan_in=tuple(inputs),
      matmul=module.Matmul(*sizes, share=num_chosen / num_experts, operands=operands),
      compute_dtype=dtype,
      quantizer=None if scheme is None else WeightQuantizer(scheme, -len(outputs) - 1),
    )
    self.w8: Any = None if self.dot is None else self.operand("w", self.dot, num_dims=2)
    (dim,), (output,) = inputs, outputs
    self._dims, self._total = (dim, output), num_experts
    bias = {**experts, **outputs}
    self.b = self.weight(bias, init=module.zeros, compute_dtype=dtype) if use_bias else None
    self.lora = None if lora is None else lora(num_experts, inputs, outputs, num_chosen)

  def sorted(self, x_MD: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns [M, F] for tokens sorted by expert; `sizes_E` counts the tokens of each expert."""
    groups = GroupedForm(sizes_E, *self._dims, self._total)
    if self.dot is None:
      y_MF = self._multiply(groups, x_MD, self.w.get_value())
    else:  # Rows of no expert, and their cotangents, must not contribute to an amax.
      x_MD = groups.mask_unused(x_MD)
      y_MF = groups.mask_unused(self._multiply(groups, x_MD, self.w.get_value()))
    if self.lora is not None:

      def multiply(x: jax.Array, w: jax.Array, input_dim: str, output_dim: str) -> Any:
        return by_form(x, w, GroupedForm(sizes_E, input_dim, output_dim, self._total))

      y_MF = self.lora(x_MD, y_MF, multiply=multiply)
    if self.b is not None:
      bias_EF = self.b[...].astype(jnp.float32)  # Its gradient is then summed in float32.
      bias_MF = jnp.repeat(bias_EF, sizes_E, axis=0, total_repeat_length=len(x_MD))
      y_MF += bias_MF.astype(self.dtype)
    return y_MF

  def placed(self, x_ECD: jax.Array) -> jax.Array:
    """Returns [E, C, F] for tokens in C capacity slots per expert."""
    y_ECF = self._multiply(BatchedForm(), x_ECD, self.w.get_value())
    if self.lora is not None:

      def multiply(x: jax.Array, w: jax.Array, *dims: str) -> jax.Array:
        del dims
        return by_form(x, w, BatchedForm())

      y_ECF = self.lora(x_ECD, y_ECF, multiply=multiply)
    y_ECF = y_ECF if self.b is None else float32_sums.add(y_ECF, self.b[...][:, None])
    return y_ECF if self.dot is None else self.dot.finished(y_ECF)

  def _multiply(self, form: GroupedForm | BatchedForm, x: jax.Array, w: Any) -> jax.Array:
    if isinstance(w, Quantized):  # The backward pass dequantizes again, as in `Linear`.
      again = jax.checkpoint(lambda x, w: self._multiply(form, x, w.dequantized(self.dtype)))
      return again(x, w)
    x, w_EDF = x.astype(self.dtype), w.astype(self.dtype)
    if self.dot is not None:
      return self.dot(form, x, w_EDF, self.w8.get_value())
    return by_form(x, w_EDF, form)

  @property
  def num_experts(self) -> int:
    """The number of experts; inside `shard_map`, of this device's experts."""
    return len(jax.tree.leaves(self.w.get_value())[0])  # Works for quantized weights too.


@configurable
class Experts(module.Module):
  """A feed-forward layer per expert; see `Mlp`."""

  def __init__(
    self,
    num_experts: ranges.Size,
    dim: ranges.Size,
    num_chosen: ranges.Size,
    *,
    hidden_dim: ranges.Size,
    up: Callable[..., ExpertLinear],
    down: Callable[..., ExpertLinear],
    gate: Callable[..., ExpertLinear] | None = None,
    activation: Activation,
  ):
    self.activation, self._hidden_dim = activation, hidden_dim
    model, ffn = {"model": dim}, {"ffn": hidden_dim}
    self.up = up(num_experts, model, ffn, num_chosen)
    self.gate = None if gate is None else gate(num_experts, model, ffn, num_chosen)
    self.down = down(num_experts, ffn, model, num_chosen)

  def __call__(self, x: jax.Array, apply: Callable[[ExpertLinear, jax.Array], jax.Array]):
    """Returns the experts' outputs; `apply` calls `ExpertLinear.sorted` or `.placed` on x."""
    up = apply(self.up, x)
    if self.gate is None:
      return apply(self.down, activate(self.activation, up))
    return apply(self.down, activate(self.activation, apply(self.gate, x), up))

  def adds_up(self, num_parts: int) -> bool:
    """Returns whether outputs are sums over equal parts of the hidden dim, apart from a bias.

    False for what may mix hidden numbers (activations and classes of users), for matmuls in 8 bits,
    whose scales are of whole arrays, and for quantized weights, whose parts have no names.
    """
    if type(self) is not Experts or self._hidden_dim % num_parts:
      return False
    linears = [linear for linear in (self.up, self.gate, self.down) if linear is not None]
    return is_elementwise(self.activation) and all(
      type(linear) is ExpertLinear
      and type(linear.lora) in (ExpertLora, type(None))
      and linear.dot is None
      and not isinstance(linear.w.get_value(), Quantized)
      for linear in linears
    )
