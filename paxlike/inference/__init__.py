# SPDX-License-Identifier: Apache-2.0
"""Decoding: prompts, sampling, and generation with a KV cache."""
