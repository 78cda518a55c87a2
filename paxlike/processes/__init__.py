# SPDX-License-Identifier: Apache-2.0
"""The processes of a job: joining, the lease of the run's folder, and detection of lost ones."""
