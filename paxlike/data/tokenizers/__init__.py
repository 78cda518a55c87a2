# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, and the settings in the files beside them."""
