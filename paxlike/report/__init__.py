# SPDX-License-Identifier: Apache-2.0
"""The page of one or several runs that `paxlike-report` writes."""
