# SPDX-License-Identifier: Apache-2.0
"""Saves, verifies and restores checkpoints in any layout; maps weights to Hugging Face's names."""
