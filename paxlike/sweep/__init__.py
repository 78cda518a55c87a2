# SPDX-License-Identifier: Apache-2.0
"""Runs of combinations of knobs: `paxlike-sweep`."""
