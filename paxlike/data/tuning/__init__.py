# SPDX-License-Identifier: Apache-2.0
"""Data for fine-tuning: chat templates, conversations and preferences."""
