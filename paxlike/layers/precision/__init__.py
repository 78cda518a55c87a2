# SPDX-License-Identifier: Apache-2.0
"""8-bit matmuls, weight-only quantization, rounding, and sums in float32."""
