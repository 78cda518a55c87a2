# SPDX-License-Identifier: Apache-2.0
"""Matmuls in 8 bits, weight-only quantization, rounding, and sums in float32."""
