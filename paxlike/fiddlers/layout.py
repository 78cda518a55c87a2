# SPDX-License-Identifier: Apache-2.0
"""Fiddlers of where and in which order layers compute."""

import fiddle as fdl

from paxlike import layers
from paxlike.config import ranges
from paxlike.errors import UserError, did_you_mean
from paxlike.fiddlers.selection import select


def attention(graph: fdl.Buildable, kernel: layers.KernelName = "auto"):
  """Sets the attention kernel; `auto` depends on the devices."""
  if kernel not in layers.KERNELS:
    hint = did_you_mean(kernel, layers.KERNELS) or f" One of {', '.join(layers.KERNELS)}."
    raise UserError(f"no attention kernel {kernel}.{hint}")
  entry = layers.KERNELS[kernel]
  for kind in (layers.Attention, layers.LatentAttention):
    for node in select(graph, kind):
      most = getattr(getattr(node, "kernel", None), "max_segments", None)
      node.kernel = fdl.Partial(entry.function) if entry.limits_segments else entry.function
      if most is not None and entry.limits_segments:
        node.kernel.max_segments = most


def segments(graph: fdl.Buildable, most: ranges.Size):
  """Sets the maximum number of segments per sequence of cuDNN attention."""
  if most < 1:
    raise UserError(f"MAX_SEGMENTS_PER_ROW={most}: a sequence has at least 1.")
  for entry in layers.KERNELS.values():
    for kernel in select(graph, entry.function) if entry.limits_segments else ():
      kernel.max_segments = most


def remat(graph: fdl.Buildable, policy: str = "SAVE_NOTHING"):
  """Sets the remat policy of blocks, a name in `layers.Remat`."""
  if policy not in layers.Remat.__members__:
    hint = did_you_mean(policy, layers.Remat.__members__)
    raise UserError(
      f"no remat policy {policy}.{hint or f' One of {list(layers.Remat.__members__)}.'}"
    )
  for kind in (layers.Stack, layers.SequentialMtp, layers.ParallelMtp):
    for node in select(graph, kind):
      node.remat = layers.Remat[policy]


def stack(graph: fdl.Buildable, scan: bool | None = True):
  """Scans over repeated blocks, or unrolls them; None: chosen by the number of devices."""
  for node in select(graph, layers.Stack):
    node.scan = scan
    if scan is False:
      node.pipeline = None


def pipeline(graph: fdl.Buildable, stages: fdl.Config[layers.Pipeline]):
  """Splits repeated blocks into the stages of a pipeline."""
  for node in select(graph, layers.Stack):
    node.scan, node.pipeline = True, stages


def shard_sequences(graph: fdl.Buildable):
  """Sequence parallelism: shards norms and residuals along time over axis tensor."""
  for kind in (layers.Block, layers.Linear):
    for node in select(graph, kind):
      node.time = "sequence"
