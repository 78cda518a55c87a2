# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, dispatch, experts and their grouped matmuls."""
