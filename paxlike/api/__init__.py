# SPDX-License-Identifier: Apache-2.0
"""The Python API: `train` trains a run, `load` loads a model, `Session` trains in parts."""
