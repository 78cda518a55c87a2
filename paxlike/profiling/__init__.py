# SPDX-License-Identifier: Apache-2.0
"""--mode=profile: measured times of the kernels of a step, beside their roofline times."""
