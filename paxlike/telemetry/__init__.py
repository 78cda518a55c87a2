# SPDX-License-Identifier: Apache-2.0
"""Reporting of a run: console, metric files, status, callbacks, and the timing of steps."""
