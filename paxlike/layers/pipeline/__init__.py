# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: its stages, its schedules, and the one executor of all of them."""
