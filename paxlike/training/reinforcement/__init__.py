# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: answers are sampled from the model, rewarded, and trained on."""
