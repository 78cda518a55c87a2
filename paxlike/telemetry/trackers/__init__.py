# SPDX-License-Identifier: Apache-2.0
"""Trackers of runs: TensorBoard, Weights & Biases, MLflow, Trackio, and those of users."""
