# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation of steps, and analysis of the compiled programs."""
