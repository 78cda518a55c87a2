# SPDX-License-Identifier: Apache-2.0
# An image with paxlike. EXTRAS chooses the devices: cuda12, cuda13 or tpu, with gcs for buckets.
#   docker build --build-arg EXTRAS=cuda13,gcs --tag paxlike:cuda13 .
# JAX's wheels bring CUDA, cuDNN and NCCL, or libtpu; the host needs NVIDIA's driver and container
# toolkit.
FROM python:3.12-slim-bookworm
ARG EXTRAS=cuda13,gcs
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# InfiniBand for NCCL; ip and sysctl, with which XPK jobs tune the network between TPU slices.
# Versions are Debian's of the day, which it replaces when it mends them.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends \
    ibverbs-providers iproute2 libibverbs1 librdmacm1 procps \
  && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/paxlike
COPY pyproject.toml README.md LICENSE ./
COPY paxlike paxlike
# pyproject.toml has the ranges of versions.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[${EXTRAS}]"

WORKDIR /workspace
