# SPDX-License-Identifier: Apache-2.0
"""Plans: which way of spreading a model over devices fits, and which is the fastest."""
