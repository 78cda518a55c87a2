# SPDX-License-Identifier: Apache-2.0
"""Scripts and manifests of jobs on clusters."""
