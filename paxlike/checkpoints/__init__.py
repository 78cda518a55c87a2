# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved, verified, converted between layouts, and the names other programs use."""
