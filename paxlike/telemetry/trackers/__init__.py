# SPDX-License-Identifier: Apache-2.0
"""Trackers of runs: TensorBoard, Weights & Biases, MLflow, Trackio, JSON lines, and others."""
