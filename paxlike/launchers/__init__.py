# SPDX-License-Identifier: Apache-2.0
"""Scripts and manifests that run a job on a cluster: Slurm, Kubernetes, GKE, TPU VMs, SSH."""
