# SPDX-License-Identifier: Apache-2.0
"""A linear map in FP8 for torch, with one current scale for each tensor.

e4m3 forward, e5m2 for gradients; weights are held in any dtype. Rows and columns of weights have to
be multiples of 16, as cuBLAS asks.
"""

from typing import Any

import torch
from torch import Tensor, nn


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
  """Returns x / scale in `dtype`, and the scale, float32."""
  largest = torch.finfo(dtype).max
  scale = x.abs().amax().float().clamp(min=1e-12) / largest
  return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


class Product(torch.autograd.Function):
  """x [M, K] times w [N, K] transposed, and both gradients, each in FP8; bfloat16 results."""

  @staticmethod
  def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore
    x8, x_scale = quantized(x, torch.float8_e4m3fn)
    w8, w_scale = quantized(w, torch.float8_e4m3fn)
    ctx.save_for_backward(x8, x_scale, w8, w_scale)
    ctx.dtypes = x.dtype, w.dtype
    return scaled(x8, w8.t(), x_scale, w_scale)

  @staticmethod
  def backward(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
    x8, x_scale, w8, w_scale = ctx.saved_tensors
    y8, y_scale = quantized(y, torch.float8_e5m2)
    # The second operand has its columns in a row, whatever is transposed.
    dx = scaled(y8, w8.t().contiguous().t(), y_scale, w_scale)
    dw = scaled(y8.t().contiguous(), x8.t().contiguous().t(), y_scale, x_scale)
    return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1])


def scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
  """Returns a times b times both scales."""
  product: Any = torch.ops.aten._scaled_mm
  return product(
    a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True
  )


def convert(module: nn.Module):
  """Has the linear maps within a module multiply by `Product`."""
  for part in module.modules():
    if type(part) is nn.Linear:
      part.__class__ = Linear


class Linear(nn.Linear):
  """nn.Linear by `Product`."""

  def forward(self, input: Tensor) -> Tensor:
    """Returns the map of [..., K], bfloat16 [..., N]."""
    y: Any = Product.apply(input.flatten(0, -2).bfloat16(), self.weight)
    y = y.unflatten(0, input.shape[:-1])
    return y if self.bias is None else y + self.bias.bfloat16()
