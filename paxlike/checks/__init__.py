# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine that a run would use: are its kernels, collectives and disks right?"""

from paxlike.checks.check import ABSENT, FAIL, PASS, REFUSED, Check
from paxlike.checks.runner import run

__all__ = ["ABSENT", "FAIL", "PASS", "REFUSED", "Check", "run"]
