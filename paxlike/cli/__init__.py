# SPDX-License-Identifier: Apache-2.0
"""The command line: flags, and what a person reads or types."""
