# SPDX-License-Identifier: Apache-2.0
"""The time of a training step, by cause."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of a step, or of a part of it, by cause.

  Attributes:
    compute: Matmuls, recomputation included.
    attention: Attention kernels.
    memory: Memory-bound kernels.
    launch: Starts of kernels.
    tensor: Exposed all-reduces of activations over `tensor`.
    expert: Exposed exchanges of tokens over `expert`.
    context: Exposed exchanges of keys and values over `context`.
    weights: What all-gathers of weights, reductions of gradients and sends between stages add.
    host: Exposed transfers of activations and optimizer state to and from the host's memory.
    update: The optimizer.
    bubble: Idle pipeline stages.
    jitter: Waiting for the slowest slice or node.
  """

  compute: float = 0.0
  attention: float = 0.0
  memory: float = 0.0
  launch: float = 0.0
  tensor: float = 0.0
  expert: float = 0.0
  context: float = 0.0
  weights: float = 0.0
  host: float = 0.0
  update: float = 0.0
  bubble: float = 0.0
  jitter: float = 0.0

  @property
  def parts(self) -> dict[str, float]:
    """The seconds by cause."""
    return dict(vars(self))

  def __add__(self, other: "Times") -> "Times":
    others = vars(other)
    return Times(**{name: seconds + others[name] for name, seconds in vars(self).items()})

  def __mul__(self, factor: float) -> "Times":
    return Times(**{name: factor * seconds for name, seconds in vars(self).items()})

  @property
  def total(self) -> float:
    """The sum."""
    return sum(vars(self).values())

  @property
  def bound(self) -> str:
    """The cause that takes the longest."""
    parts = vars(self)
    return max(parts, key=lambda name: parts[name])
