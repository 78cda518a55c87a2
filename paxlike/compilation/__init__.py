# SPDX-License-Identifier: Apache-2.0
"""Steps compiled ahead of time, and what the compiled program holds."""
