# SPDX-License-Identifier: Apache-2.0
"""What Python calls: `train` makes a run, `load` a model."""
