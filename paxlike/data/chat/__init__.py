# SPDX-License-Identifier: Apache-2.0
"""Chat templates: they render messages as the text that a model was tuned on."""
