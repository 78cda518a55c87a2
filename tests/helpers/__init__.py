# SPDX-License-Identifier: Apache-2.0
"""What tests of several files use, and programs that try what takes longer than a test may."""
