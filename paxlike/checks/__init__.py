# SPDX-License-Identifier: Apache-2.0
"""Checks of a machine before a run: correctness and speed of kernels, collectives and disks."""

from paxlike.checks.check import ABSENT, FAIL, PASS, REFUSED, Check
from paxlike.checks.runner import run

__all__ = ["ABSENT", "FAIL", "PASS", "REFUSED", "Check", "run"]
