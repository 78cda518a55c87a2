# SPDX-License-Identifier: Apache-2.0
"""Layers with a recurrent state instead of keys and values, exact under packing and sharding."""
