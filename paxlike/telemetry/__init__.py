# SPDX-License-Identifier: Apache-2.0
"""What a run reports: console, metric files, status, and the timing of steps."""
