# SPDX-License-Identifier: Apache-2.0
"""The command line: flags, `--help`, and the output of the modes and commands."""
