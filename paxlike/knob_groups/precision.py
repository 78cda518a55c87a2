# SPDX-License-Identifier: Apache-2.0
"""The knobs of dtypes and of 8-bit matmuls."""

from typing import Literal

from paxlike.config import ranges
from paxlike.config.knobs import Knobs
from paxlike.errors import UserError


class PrecisionKnobs(Knobs):
  """Precision: dtypes of weights and of computation, and 8-bit matmuls."""

  FPROP_DTYPE: ranges.ComputeDtype = "bfloat16"  #: Compute dtype.
  #: Storage dtype of trained weights; bfloat16 uses stochastic rounding.
  WEIGHT_DTYPE: Literal["float32", "bfloat16"] = "float32"
  #: 8-bit matmuls in the linear maps and experts of blocks: fp8 (current scaling), fp8_delayed
  #: (delayed scaling), mxfp8 (block scaling, not in experts) or int8. None: compute dtype.
  #: Quantization-aware training for an export in that format: qat_int8, qat_int4 (a scale per 128
  #: inputs), qat_fp8, qat_fp8_blocks (128 x 128).
  QUANTIZATION: (
    Literal[
      "fp8",
      "fp8_delayed",
      "mxfp8",
      "int8",
      "qat_int8",
      "qat_int4",
      "qat_fp8",
      "qat_fp8_blocks",
    ]
    | None
  ) = None
  USE_FP8: bool = False  #: Pax's name for QUANTIZATION=fp8.
  ENABLE_TE: bool = False  #: Use NVIDIA's Transformer Engine in the linear maps of blocks.

  def quantization(self) -> str | None:
    """Returns the quantization of matmuls, a value of QUANTIZATION.

    Raises:
      UserError: USE_FP8 and QUANTIZATION contradict each other.
    """
    if not self.USE_FP8:
      return self.QUANTIZATION
    if self.QUANTIZATION not in (None, "fp8", "fp8_delayed"):
      raise UserError(f"USE_FP8=True, but QUANTIZATION={self.QUANTIZATION}: set one of them.")
    return self.QUANTIZATION or "fp8"
