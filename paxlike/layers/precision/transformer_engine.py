# SPDX-License-Identifier: Apache-2.0
"""Matmuls with the kernels of NVIDIA's Transformer Engine, where it is installed."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.precision.matmul import Dot, LinearForm, MatmulForm
from paxlike.layers.precision.rounding import QuantizedOperand


@configurable
@dataclasses.dataclass(frozen=True)
class TransformerEngine(Dot):
  """A `Dot` for linear maps: FP8 with current scaling, e4m3 operands and e5m2 cotangents.

  Attributes:
    fp8: Whether to quantize; otherwise it multiplies in the dtype of the operands.
  """

  fp8: bool = True

  @property
  def operands(self) -> str | None:
    return "fp8" if self.fp8 else None

  def quantized(self, w: jax.Array) -> None:
    """Returns None: Transformer Engine quantizes weights itself, in every matmul."""

  def __call__(
    self, form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand | None = None
  ) -> jax.Array:
    assert isinstance(form, LinearForm)
    library = load()
    quantizers: dict[str, Any] = {}
    if self.fp8:
      quantizers["quantizer_set"] = library.quantize.QuantizerFactory.create_set(
        scaling_mode=library.quantize.ScalingMode.CURRENT_TENSOR_SCALING,
        fwd_dtype=jnp.float8_e4m3fn,
        bwd_dtype=jnp.float8_e5m2,
      )
    return library.dense.dense(x, w, contracting_dims=((x.ndim - 1,), (0,)), **quantizers)


def load() -> Any:
  """Returns the package `transformer_engine.jax`.

  Raises:
    UserError: It is not installed, or cannot be loaded.
  """
  try:
    # The package does not import this module itself.
    importlib.import_module("transformer_engine.jax.dense")
    return importlib.import_module("transformer_engine.jax")
  except (ImportError, OSError, RuntimeError) as error:
    reason = str(error).strip().partition("\n")[0]
    raise UserError(
      "Transformer Engine (pip install --no-build-isolation 'transformer_engine[jax]') cannot be"
      f" loaded: {reason}"
    ) from error
