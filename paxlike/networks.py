# SPDX-License-Identifier: Apache-2.0
"""What joins accelerators: a fast network within a slice or node, a slower one between them.

Rates are those of data sheets, in one direction. TPUs: cloud.google.com/tpu/docs/v5e, v5p and v6e
(half of what is told of both directions; of the slow network the share of a chip). GPUs: NVLink of
the SXM modules, and a port of InfiniBand for each GPU of NVIDIA's DGX, or of a GB200 NVL72 rack.
"""

import dataclasses
import math
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Network:
  """What joins devices of a kind.

  Attributes:
    fast: Bytes/s that a device sends over all its links of the fast network.
    slow: Bytes/s that it sends over the slow one.
    names: Of the two.
    dims: Of the torus that the fast network is; 0: a switch, through which each device sends to any
      at the full rate.
    closed_from: Devices from which the torus closes its rings; smaller ones have half the rate.
    layers_gathered: Layers whose weights, or gradients of them, are whole on a device at once: one
      and the gradients of a half; where the next is gathered beside it, as on GPUs, three.
    sums_whole: Whether XLA sums a gradient whole where each device keeps a part, as for TPUs.
    beside_products: Whether sums of what products give go on beside these (Wang et al., 2023, doi
      10.1145/3567955.3567959): XLA does so for TPUs.
    across_nodes: Whether the fast network of GPUs joins all nodes of a slice, which is a rack.
  """

  fast: float
  slow: float
  names: tuple[str, str]
  dims: int = 0
  closed_from: int = 1
  layers_gathered: float = 3
  sums_whole: bool = False
  beside_products: bool = False
  across_nodes: bool = False


_GPU, _TPU = ("NVLink", "InfiniBand"), ("ICI", "DCN")

# By a part of JAX's `device_kind`, the more special first.
NETWORKS = {
  "GB200": Network(900e9, 50e9, _GPU, across_nodes=True),
  "B300": Network(900e9, 100e9, _GPU),
  "B200": Network(900e9, 50e9, _GPU),
  "H200": Network(450e9, 50e9, _GPU),
  "H100": Network(450e9, 50e9, _GPU),
  "A100": Network(300e9, 25e9, _GPU),
  "TPU v5 lite": Network(200e9, 3.125e9, _TPU, 2, 256, 1.5, True, True),
  "TPU v5e": Network(200e9, 3.125e9, _TPU, 2, 256, 1.5, True, True),
  "TPU v5": Network(600e9, 6.25e9, _TPU, 3, 64, 1.5, True, True),
  "TPU v6": Network(400e9, 12.5e9, _TPU, 2, 256, 1.5, True, True),
  # Half of a chip's (docs.cloud.google.com/tpu/docs/tpu7x), without its link to the other half.
  "TPU7x": Network(300e9, 6.25e9, _TPU, 3, 128, 1.5, True, True),
}


class Group(NamedTuple):
  """Devices that an axis of a mesh joins: `inner` of each of `outer` slices or nodes.

  Attributes:
    inner: Size of the axis within a slice or node.
    outer: Its size across them.
    within: All devices of a slice or node.
  """

  inner: int
  outer: int
  within: int

  @property
  def size(self) -> int:
    """Devices that exchange something."""
    return self.inner * self.outer


def find(device_kind: str) -> Network | None:
  """Returns what joins devices that JAX calls so; None where it is not known."""
  kind = device_kind.lower()
  return next((one for name, one in NETWORKS.items() if name.lower() in kind), None)


def rate(network: Network, group: Group) -> float:
  """Returns the bytes/s at which a device of a group sends within its slice or node.

  Of a torus an axis of n of N devices has log n / log N of the links.
  """
  if not network.dims or group.inner == 1:
    return network.fast
  links = math.log(group.inner) / math.log(group.within)
  return network.fast * links * (1 if group.within >= network.closed_from else 0.5)


def gather(network: Network, group: Group, nbytes: float) -> float:
  """Returns the seconds in which each device of a group gets all parts of an array, or sums them.

  In pieces, so that both networks work at once. A slice or node fetches what it lacks through the
  ports of all its devices in the group.

  Args:
    network: What joins them.
    group: The devices.
    nbytes: Of the whole array.
  """
  inside = nbytes * (group.size - 1) / group.size / rate(network, group)
  across = nbytes * (group.outer - 1) / group.outer / group.inner / network.slow
  return max(inside if group.inner > 1 else 0.0, across)


def reduce(network: Network, group: Group, nbytes: float) -> float:
  """Returns the seconds in which each device gets the sum of arrays: scatter, then gather."""
  return 2 * gather(network, group, nbytes)


def exchange(network: Network, group: Group, nbytes: float) -> float:
  """Returns the seconds in which each device sends a part of an array of its own to each other."""
  inside = nbytes * (group.inner - 1) / group.size / rate(network, group)
  return max(inside, nbytes * (group.outer - 1) / group.outer / network.slow)


def send(network: Network, group: Group, nbytes: float) -> float:
  """Returns the seconds in which each device sends an array of its own to the next."""
  if group.size == 1:
    return 0.0
  return nbytes / (network.slow if group.outer > 1 else rate(network, group))
