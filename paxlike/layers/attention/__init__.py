# SPDX-License-Identifier: Apache-2.0
"""Attention: layers, kernels, positions, caches, and context parallelism."""
