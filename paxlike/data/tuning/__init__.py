# SPDX-License-Identifier: Apache-2.0
"""Corpora for fine-tuning: conversations, and preferences between answers."""
