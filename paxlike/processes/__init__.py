# SPDX-License-Identifier: Apache-2.0
"""The processes of a job: how they join, who owns a folder, and how a lost one is found."""
