# SPDX-License-Identifier: Apache-2.0
"""Token data: tokenization, sequence packing, mixtures; resumable from every position."""
