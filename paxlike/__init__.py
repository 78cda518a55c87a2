# SPDX-License-Identifier: Apache-2.0
"""Trains language models from one experiment class."""

__version__ = "0.1.0"
