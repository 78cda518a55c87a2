# SPDX-License-Identifier: Apache-2.0
"""The user's text files and record formats."""
