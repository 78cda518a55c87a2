# SPDX-License-Identifier: Apache-2.0
"""Converts checkpoints between paxlike and Hugging Face, Meta and PEFT, a tensor at a time."""
