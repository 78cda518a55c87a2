# SPDX-License-Identifier: Apache-2.0
"""Experiments, a file for each family of models, and the data mixins that complete them."""
