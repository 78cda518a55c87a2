# SPDX-License-Identifier: Apache-2.0
"""Training: the trainer, its step and state, objectives, optimizers and evaluation."""
