# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of others to paxlike and back, a tensor at a time."""
