# SPDX-License-Identifier: Apache-2.0
"""Recipes for GPUs: experiments named for their hardware."""
