# SPDX-License-Identifier: Apache-2.0
"""The knobs of `Experiment` in groups, each beside the methods that read it."""
