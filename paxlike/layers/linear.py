# SPDX-License-Identifier: Apache-2.0
"""Linear maps between named dims."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxlike import mesh, ranges
from paxlike.configurable import configurable
from paxlike.layers import module, sums
from paxlike.layers.context import Context
from paxlike.layers.lora import Lora
from paxlike.layers.products import Dim, Dot, Plain
from paxlike.layers.quantization import Int8, Quantized, Storage
from paxlike.layers.remat import named
from paxlike.layers.rounding import whole

_EXACT = Plain().exact


@configurable
class Linear(module.Module):
  """y = x w + b, summing over the trailing dims of x that `inputs` names.

  Attributes:
    role: What the map is for ("query", "up", "head" ...): fiddlers select by it.
    dtype: The dtype of the product; the weights stay float32.
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
    time: str = "time",
  ):
    """`dot` multiplies x with w in few bits; `time` is what T is called around it.

    `lora` adapts the map, whose own weights are then not trained. Where weights are only read, they
    are held by a `scheme`, a function of `quantization`.
    """
    self.role = role
    self.time = time
    self.dtype = dtype
    self.dot = None if dot is None else dot()
    self.num_inputs = len(inputs)
    self._outputs = tuple(outputs.values())
    self._plain = Plain(*(tuple(Dim(*dim) for dim in dims.items()) for dims in (inputs, outputs)))
    self.w = self.weight(
      {**inputs, **outputs},
      init=init,
      fan_in=tuple(inputs),
      compute_dtype=dtype,
      storage=None if scheme is None else Storage(scheme, -len(outputs) - 1),
      rounding=None if self.dot is None else self.dot.rounding(len(inputs), len(outputs)),
    )
    self.b = self.weight(outputs, init=module.zeros, compute_dtype=dtype) if use_bias else None
    self.lora = None if lora is None else lora(inputs, outputs, role=role)

  def __call__(self, x: jax.Array, context: Context | None = None) -> jax.Array:
    """Returns [..., *outputs] for x [..., *inputs]; only an adapter's dropout needs the context."""
    w = self.w.get_value()
    leading = x.shape[: x.ndim - self.num_inputs]
    outputs = self._outputs
    x = x.astype(self.dtype).reshape(*leading, -1)
    # What is held in few bits is made whole again for the gradient, rather than kept till then.
    y = jax.checkpoint(self._product)(x, w) if isinstance(w, Quantized) else self._product(x, w)
    if self.lora is not None:
      y += self.lora(x, context)
    y = y.reshape(*leading, *outputs)
    return named(y if self.b is None else sums.add(y, self.b[...]), self.role)

  def _product(self, x: jax.Array, w: Any) -> jax.Array:
    rows = x.shape[-1]
    if isinstance(w, Int8) and self.dot is None and w.reads_less(x.size // rows):
      return w.product(x.reshape(-1, rows)).reshape(*x.shape[:-1], -1)
    dense = whole(w, self.dtype)
    if self.dot is None:
      return matmul(x, dense.reshape(rows, -1), self._plain.exact, self.time)
    rounded = None if self.w.rounding is None else self.w.rounding.of(w, dense).matrix(rows)
    dot = functools.partial(self.dot, self._plain, rounded=rounded)
    return matmul(x, dense.reshape(rows, -1), dot, self.time)

  def matrix(self) -> jax.Array:
    """Returns [*inputs, *outputs] in the compute dtype: all that x is multiplied with."""
    w = whole(self.w.get_value(), self.dtype)
    return w if self.lora is None else w + self.lora.matrix().reshape(w.shape)


def matmul(
  x: jax.Array, w: jax.Array, dot: Callable[..., jax.Array] = _EXACT, time: str = "time"
) -> jax.Array:
  """Returns x [..., D] times w [D, F], as one product of matrices if the mesh does not cut `time`.

  XLA's CPU and GPU libraries are fastest on plain matrices, and gradients need fewer transposes.
  """
  if mesh.is_sharded(time):
    return dot(x, w)
  return dot(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[-1])
