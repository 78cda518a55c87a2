# SPDX-License-Identifier: Apache-2.0
"""Search for the fastest parallel configuration of a model that fits in memory."""
