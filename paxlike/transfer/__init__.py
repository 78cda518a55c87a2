# SPDX-License-Identifier: Apache-2.0
"""--mode=transfer: whether hyperparameters of a small model serve wide and deep ones."""
