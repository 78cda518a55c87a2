# SPDX-License-Identifier: Apache-2.0
"""The time of collectives, by the links that they use."""

import pytest

from paxlike.devices import interconnect
from paxlike.devices.interconnect import Group


def test_networks():
  h100, v5e = interconnect.find("NVIDIA H100"), interconnect.find("TPU v5 lite")
  assert h100 is not None and v5e is not None
  assert interconnect.find("cpu") is None
  node, across = Group(8, 1, 8), Group(8, 8, 8)
  assert interconnect.gather(h100, node, 450e9, count=0) == pytest.approx(7 / 8)
  # Eight ports of a node fetch seven eighths.
  assert interconnect.gather(h100, across, 400e9, count=0) == pytest.approx(63 / 64 * 400 / 450)
  assert interconnect.gather(h100, Group(1, 8, 8), 50e9, count=0) == pytest.approx(7 / 8)
  assert (
    interconnect.reduce(h100, Group(1, 1, 8), 1e9)
    == interconnect.send(h100, Group(1, 1, 8), 1e9)
    == 0
  )
  # Of a torus of 16 x 16, sixteen chips have one of two dims; a smaller slice is open.
  assert interconnect.rate(v5e, Group(256, 1, 256)) == 200e9
  assert interconnect.rate(v5e, Group(16, 1, 256)) == pytest.approx(100e9)
  assert interconnect.rate(v5e, Group(16, 1, 16)) == pytest.approx(100e9)
  assert interconnect.exchange(h100, node, 450e9) == pytest.approx(7 / 8, rel=1e-4)


def test_collectives_take_the_steps_of_nccl_besides_their_bytes():
  """A ring has a step to each device, a tree one to each doubling of the number of nodes."""
  h100, v5e = (interconnect.NETWORKS[name] for name in ("H100", "TPU v5e"))
  start, link, port = 8.4e-6, 3.4e-6, 14e-6
  node, across = Group(8, 1, 8), Group(8, 8, 8)
  assert interconnect.latency(h100, Group(1, 1, 8)) == 0
  assert interconnect.latency(h100, node) == pytest.approx(start + 7 * link)
  assert interconnect.latency(h100, across) == pytest.approx(start + 56 * link + 7 * port)
  assert interconnect.gather(h100, across, 0.0, count=3) == pytest.approx(
    3 * interconnect.latency(h100, across)
  )
  assert interconnect.reduce(h100, across, 0.0) == pytest.approx(start + 2 * (7 * 4e-6 + 3 * port))
  # All 256 chips of a torus of 16 x 16: half way around each of two rings.
  assert interconnect.latency(v5e, Group(256, 1, 256)) == pytest.approx(17e-6)
