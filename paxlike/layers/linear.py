# SPDX-License-Identifier: Apache-2.0
"""Linear maps between named dims."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.layers import module
from paxlike.layers.call_context import Context
from paxlike.layers.lora import Lora
from paxlike.layers.precision import float32_sums
from paxlike.layers.precision.matmul import Dim, Dot, LinearForm, keeps_dims, matmul
from paxlike.layers.precision.weight_only import Int8Weight, Quantized, WeightQuantizer, dense
from paxlike.layers.remat import named


@configurable
class Linear(module.Module):
  """A linear map y = x w + b that contracts the trailing dims of x, `inputs`.

  Attributes:
    role: What the map is for ("query", "up", "head" ...); fiddlers select by it.
    dtype: The dtype of the matmul; the weights stay float32.
  """

  def __init__(
    self,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    role: str,
    use_bias: bool = False,
    init: module.Initializer = module.gaussian_fan_in,
    dtype: ranges.ComputeDtype = jnp.float32,
    dot: Callable[[], Dot] | None = None,
    lora: Callable[..., Lora] | None = None,
    scheme: Callable[..., Quantized] | None = None,
    scale: ranges.Finite = 1.0,
    time: mesh.Dim = "time",
  ):
    """Builds the layer.

    Args:
      inputs: Name -> size of the contracted dims.
      outputs: Name -> size of the output dims.
      role: See the class.
      use_bias: Whether to add b.
      init: Initializer of w.
      dtype: See the class.
      dot: Low-precision matmul; None: matmul in `dtype`.
      lora: Low-rank adapter, trained while w and b are frozen.
      scheme: Weight-only quantization of w (a function of `weight_only`), applied if w is frozen.
      scale: Multiplies the output, the bias included.
      time: The dim name of T in the input: "time" or "sequence".
    """
    self.role = role
    self.time = time
    self.scale = scale
    self.dtype = dtype
    self.dot = None if dot is None else dot()
    self.num_inputs = len(inputs)
    self._outputs = tuple(outputs.values())
    operands = None if self.dot is None else self.dot.operands
    self._form = LinearForm(
      *(tuple(Dim(*dim) for dim in dims.items()) for dims in (inputs, outputs))
    )
    sizes = (math.prod(dims.values()) for dims in (inputs, outputs))
    self.w = self.weight(
      {**inputs, **outputs},
      init=init,
      fan_in=tuple(inputs),
      matmul=module.Matmul(*sizes, role=role, operands=operands),
      compute_dtype=dtype,
      quantizer=None if scheme is None else WeightQuantizer(scheme, -len(outputs) - 1),
    )
    num_dims = len(inputs) + len(outputs)
    self.w8: Any = None if self.dot is None else self.operand("w", self.dot, num_dims=num_dims)
    self.b = self.weight(outputs, init=module.zeros, compute_dtype=dtype) if use_bias else None
    self.lora = None if lora is None else lora(inputs, outputs, role=role)

  def __call__(self, x: jax.Array, context: Context | None = None) -> jax.Array:
    """Returns [..., *outputs] for x [..., *inputs]; only LoRA dropout uses the context."""
    with jax.named_scope(self.role):
      leading = x.shape[: x.ndim - self.num_inputs]
      x = x.astype(self.dtype).reshape(*leading, -1)
      y = self.multiply(x)
      if self.lora is not None:
        y = self.lora(x, y, base=self, context=context)
      # cuBLAS adds a bias as it writes the product, if the output dims are not split before.
      y = y if self.b is None else float32_sums.add(y, self.b[...].reshape(-1))
      y = y if self.dot is None else self.dot.finished(y)
      y = y.reshape(*leading, *self._outputs)
      return named(y if self.scale == 1 else y * jnp.asarray(self.scale, y.dtype), self.role)

  def multiply(self, x: jax.Array) -> jax.Array:
    """Returns [..., F], x times w, for x [..., D]; D and F are flattened dims."""
    w = self.w.get_value()
    tokens = flatten_tokens(x, self.time)
    y: Any
    if isinstance(w, Quantized):
      # The backward pass dequantizes again instead of keeping the dense weight.
      y = jax.checkpoint(self._weight_only)(tokens, w)
    else:
      w = w.astype(self.dtype).reshape(x.shape[-1], -1)
      if self.dot is not None:
        y = self.dot(self._form, tokens, w, self.w8.get_value())
      else:
        y = matmul(tokens, w, *self._form.sizes)
    return y.reshape(*x.shape[:-1], -1)

  def _weight_only(self, x: jax.Array, w: Quantized) -> jax.Array:
    """Returns x w for a weight-only quantized w."""
    inputs = x.shape[-1]
    if self.dot is None and isinstance(w, Int8Weight) and w.reads_less(x.size // inputs):
      return w.multiply(x.reshape(-1, inputs)).reshape(*x.shape[:-1], -1)
    w_DF = w.dequantized(self.dtype).reshape(inputs, -1)
    if self.dot is not None:
      return self.dot(self._form, x, w_DF)
    return matmul(x, w_DF, *self._form.sizes)

  def frozen_matrix(self) -> jax.Array:
    """Returns w [D, F] in the compute dtype, dequantized, without LoRA."""
    w = dense(self.w.get_value(), self.dtype)
    return w.reshape(math.prod(w.shape[: self.num_inputs]), -1)

  def matrix(self) -> jax.Array:
    """Returns the effective weight [*inputs, *outputs] in the compute dtype, LoRA included."""
    w = dense(self.w.get_value(), self.dtype)
    w = w if self.lora is None else self.lora.merged(self.frozen_matrix()).reshape(w.shape)
    return w if self.scale == 1 else w * jnp.asarray(self.scale, w.dtype)


def flatten_tokens(x: jax.Array, time: mesh.Dim = "time") -> jax.Array:
  """Returns x [..., D] as [M, D]; unchanged on TPUs, or if the mesh shards the dim named `time`.

  XLA's matmul libraries for CPUs and GPUs are fastest on 2D operands, whose gradients also need
  fewer transposes.
  """
  return x if keeps_dims() or mesh.is_sharded(time) else x.reshape(-1, x.shape[-1])
