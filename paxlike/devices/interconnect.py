# SPDX-License-Identifier: Apache-2.0
"""Interconnects: a fast network within a slice or node, a slower one between them.

A collective takes a latency and the time of its bytes. Rates are one-directional bandwidths from
data sheets. TPUs: cloud.google.com/tpu/docs/v4, v5e, v5p and v6e (half of the bidirectional ICI
rate, and a chip's share of the DCN rate). GPUs: NVLink of the SXM modules, and one InfiniBand port
per GPU of NVIDIA's DGX or of a GB200 NVL72 rack. To the host: PCIe of 16 lanes, generation 4 (A100)
or 5, and NVLink-C2C of GB200; TPUs: jax-ml.github.io/scaling-book/tpus (TPU7x: as of v6e).

Latencies of GPUs are those by which NCCL chooses its algorithms (src/graph/tuning.cc, Simple
protocol); those of TPUs are the order of magnitude that Google names.
"""

import dataclasses
import math
from typing import Any, NamedTuple


class Latency(NamedTuple):
  """Seconds of a collective besides those of its bytes.

  Attributes:
    start: Before its first step.
    fast, slow: Of each step of a ring over the fast and the slow network.
    tree_fast, tree_slow: Of each step of a tree, for all-reduces.
  """

  start: float
  fast: float
  slow: float
  tree_fast: float = 0.0
  tree_slow: float = 0.0


_NCCL, _ICI = Latency(8.4e-6, 3.4e-6, 14e-6, 4e-6, 14e-6), Latency(1e-6, 1e-6, 1e-5)


@dataclasses.dataclass(frozen=True)
class Network:
  """The interconnect of a kind of device.

  Attributes:
    fast: Bytes/s that a device sends over all its links in the fast network.
    slow: Bytes/s that a device sends over the slow network.
    host: Bytes/s that a device sends to the memory of its host.
    names: Names of the fast and the slow network.
    dims: Dims of the fast network's torus; 0: a switch with the full rate between any two devices.
    closed_from: Slice size in devices from which the torus has wraparound links; smaller slices
      have half the rate.
    layers_gathered: Layers whose all-gathered weights or full gradients are live at once,
      fitted to compiled programs: 1.5 on TPUs (a layer and half of its gradients), 3 on GPUs.
    sums_whole: Whether XLA all-reduces the gradients of sharded weights instead of
      reduce-scattering them (TPUs).
    beside_products: Whether XLA overlaps a matmul with the all-reduce of its output (TPUs; Wang et
      al., 2023, doi 10.1145/3567955.3567959).
    across_nodes: Whether NVLink connects all nodes of a rack.
  """

  fast: float
  slow: float
  host: float
  names: tuple[str, str]
  dims: int = 0
  closed_from: int = 1
  layers_gathered: float = 3
  sums_whole: bool = False
  beside_products: bool = False
  across_nodes: bool = False

  @property
  def latency(self) -> Latency:
    """What collectives take besides the time of their bytes."""
    return _ICI if self.dims else _NCCL


_GPU, _TPU = ("NVLink", "InfiniBand"), ("ICI", "DCN")

# Keyed by a substring of JAX's `device_kind`, more specific names first.
NETWORKS = {
  "GB200": Network(900e9, 50e9, 450e9, _GPU, across_nodes=True),
  "B300": Network(900e9, 100e9, 64e9, _GPU),
  "B200": Network(900e9, 50e9, 64e9, _GPU),
  "H200": Network(450e9, 50e9, 64e9, _GPU),
  "H100": Network(450e9, 50e9, 64e9, _GPU),
  "A100": Network(300e9, 25e9, 32e9, _GPU),
  "TPU v4": Network(300e9, 6.25e9, 16e9, _TPU, 3, 64, 1.5, True, True),  # DCN: as of v5p.
  "TPU v5 lite": Network(200e9, 3.125e9, 16e9, _TPU, 2, 256, 1.5, True, True),
  "TPU v5e": Network(200e9, 3.125e9, 16e9, _TPU, 2, 256, 1.5, True, True),
  "TPU v5": Network(600e9, 6.25e9, 16e9, _TPU, 3, 64, 1.5, True, True),
  "TPU v6": Network(400e9, 12.5e9, 32e9, _TPU, 2, 256, 1.5, True, True),
  # Half of a chip's rate (docs.cloud.google.com/tpu/docs/tpu7x), without the link between halves.
  "TPU7x": Network(300e9, 6.25e9, 32e9, _TPU, 3, 128, 1.5, True, True),
}


class Group(NamedTuple):
  """A group of devices along mesh axes: `inner` devices in each of `outer` slices or nodes.

  Attributes:
    inner: Size of the axes within a slice or node.
    outer: Size of the axes across slices or nodes.
    within: The number of devices of a whole slice or node.
  """

  inner: int
  outer: int
  within: int

  @property
  def size(self) -> int:
    """The number of devices of the group."""
    return self.inner * self.outer


def find(device_kind: str) -> Network | None:
  """Returns the network of a JAX `device_kind`; None if unknown."""
  kind = device_kind.lower()
  return next((one for name, one in NETWORKS.items() if name.lower() in kind), None)


def place(device: Any) -> tuple[Any, ...]:
  """Returns what is equal for the devices of a slice or node, and of a rack that NVLink joins."""
  network, slice_index = find(device.device_kind), getattr(device, "slice_index", None)
  if device.platform == "tpu" or (network is not None and network.across_nodes):
    return (slice_index,)
  return slice_index, device.process_index


def rate(network: Network, group: Group) -> float:
  """Returns the bytes/s at which a device of a group sends within its slice or node.

  In a torus of N devices, a group of n devices has the fraction log n / log N of the links.
  """
  if not network.dims or group.inner == 1:
    return network.fast
  links = math.log(group.inner) / math.log(group.within)
  return network.fast * links * (1 if group.within >= network.closed_from else 0.5)


def latency(network: Network, group: Group) -> float:
  """Returns the seconds of an all-gather or a reduce-scatter besides those of its bytes.

  It goes around a ring of all devices of a group, or around one in each dim of a torus.
  """
  if group.size == 1:
    return 0.0
  one = network.latency
  # Half of a ring in either direction; the dims of a torus are of one size.
  inside = group.inner ** (1 / max(1, network.dims))
  steps = network.dims * inside / 2 if network.dims else group.size - group.outer
  return one.start + steps * one.fast + (group.outer - 1) * one.slow


def gather(network: Network, group: Group, nbytes: float, *, count: float = 1) -> float:
  """Returns the seconds of all-gathers or reduce-scatters over a group.

  It assumes that both networks transfer concurrently, and that a slice or node receives through
  the ports of all its devices in the group.

  Args:
    network: The interconnect.
    group: The devices.
    nbytes: Bytes of all full arrays.
    count: The number of collectives.
  """
  return _moved(network, group, nbytes) + count * latency(network, group)


def _moved(network: Network, group: Group, nbytes: float) -> float:
  inside = nbytes * (group.size - 1) / group.size / rate(network, group)
  across = nbytes * (group.outer - 1) / group.outer / group.inner / network.slow
  return max(inside if group.inner > 1 else 0.0, across)


def reduce(network: Network, group: Group, nbytes: float, *, count: float = 1) -> float:
  """Returns the seconds of all-reduces: reduce-scatters and all-gathers; see `gather`.

  NCCL takes a tree where it has fewer steps.
  """
  if group.size == 1:
    return 0.0
  if network.dims:
    steps = 2 * latency(network, group)
  else:
    tree = (group.inner - 1) * _NCCL.tree_fast + math.log2(group.outer) * _NCCL.tree_slow
    steps = _NCCL.start + 2 * min(latency(network, group) - _NCCL.start, tree)
  return 2 * _moved(network, group, nbytes) + count * steps


def exchange(network: Network, group: Group, nbytes: float) -> float:
  """Returns the seconds of an all-to-all of `nbytes` per device."""
  if group.size == 1:
    return 0.0
  inside = nbytes * (group.inner - 1) / group.size / rate(network, group)
  moved = max(inside, nbytes * (group.outer - 1) / group.outer / network.slow)
  return moved + _send_latency(network, group)


def send(network: Network, group: Group, nbytes: float) -> float:
  """Returns the seconds of a collective-permute of `nbytes` per device.

  In a torus it takes one of the links of a device.
  """
  if group.size == 1:
    return 0.0
  link = network.fast / (2 * network.dims) if network.dims else network.fast
  moved = nbytes / (network.slow if group.outer > 1 else link)
  return moved + _send_latency(network, group)


def _send_latency(network: Network, group: Group) -> float:
  one = network.latency
  return one.start + (one.slow if group.outer > 1 else one.fast)
