# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages as the text that a model was tuned on, and where its turns end."""
