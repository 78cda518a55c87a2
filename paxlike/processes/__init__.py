# SPDX-License-Identifier: Apache-2.0
"""The processes of a job: joining, ownership of the run's folder, and detection of lost ones."""
