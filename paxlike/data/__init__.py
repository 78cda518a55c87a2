# SPDX-License-Identifier: Apache-2.0
"""Token data: every source becomes rows that are known by number, so any run can be resumed."""
