# SPDX-License-Identifier: Apache-2.0
"""The time of a compiled program, on a timeline of its kernels and collectives."""

import dataclasses

import pytest

from paxlike.compilation import hlo_kernels
from paxlike.devices import chips, interconnect
from paxlike.devices.interconnect import Group
from paxlike.devices.kernel_rates import Fitted, KernelRates
from paxlike.planning import program_time
from paxlike.planning.machines import Machine

CHIP, NETWORK = chips.CHIPS["H100"], interconnect.NETWORKS["H100"]
MACHINE = Machine(CHIP, NETWORK, KernelRates(), dataclasses.replace(Fitted(), contention=0.25))


class Gpu:
  """A device of a node of eight."""

  platform, device_kind, slice_index = "gpu", "NVIDIA H100", 0

  def __init__(self, number: int):
    self.id, self.process_index = number, number // 8


def program(body: str, more: str = "") -> str:
  return f"""HloModule step

{more}
ENTRY %main (x: f32[33554432], w: bf16[8388608]) -> f32[33554432] {{
  %x = f32[33554432] parameter(0)
  %w = bf16[8388608] parameter(1)
{body}
}}
"""


KERNEL = 2 * 4 * 33554432 / CHIP.bandwidth  # Reads and writes 128 MiB.
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
GATHER = interconnect.gather(NETWORK, Group(8, 1, 8), 8 * 2 * 8388608)
ONE = "  %{0} = f32[33554432] negate(%x)"


def seconds(text: str, count: int = 8, **options: float) -> program_time.ProgramTime:
  devices = [Gpu(number) for number in range(count)]
  return program_time.predict(text, devices, MACHINE, **options)


def test_computation_waits_for_a_synchronous_collective():
  gather = f"  %g = bf16[67108864] all-gather(%w), {GROUPS}"
  found = seconds(program("\n".join([ONE.format("a"), gather, ONE.format("b")])))
  assert found.kernels == pytest.approx(2 * KERNEL) and found.collectives == pytest.approx(GATHER)
  assert found.exposed == pytest.approx(GATHER)
  assert found.total == pytest.approx(2 * KERNEL + GATHER)


@pytest.mark.parametrize("kernels", [1, 40])
def test_an_asynchronous_collective_delays_what_waits_for_it_or_shares_the_memory(kernels):
  start = f"  %s = (bf16[8388608], bf16[67108864]) all-gather-start(%w), {GROUPS}"
  between = [ONE.format(f"a{number}") for number in range(kernels)]
  done = "  %g = bf16[67108864] all-gather-done(%s)"
  found = seconds(program("\n".join([start, *between, done])))
  work = kernels * KERNEL
  shorter, longer = sorted((work, GATHER))
  slowed = work + 0.25 * min(shorter, GATHER)
  assert found.total == pytest.approx(max(slowed, GATHER), rel=0.02)
  assert found.exposed == pytest.approx(max(0.0, GATHER - slowed), abs=1e-6)
  assert longer <= found.total < work + GATHER


LOOP = """
%body (p: (s32[], f32[33554432], bf16[8388608])) -> (s32[], f32[33554432], bf16[8388608]) {
  %p = (s32[], f32[33554432], bf16[8388608]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x.1 = f32[33554432] get-tuple-element(%p), index=1
  %w.1 = bf16[8388608] get-tuple-element(%p), index=2
  %g.1 = bf16[67108864] all-gather(%w.1), GROUPS
  %n.1 = f32[33554432] negate(%x.1)
  ROOT %t = (s32[], f32[33554432], bf16[8388608]) tuple(%i, %n.1, %w.1)
}

%limit (q: (s32[], f32[33554432], bf16[8388608])) -> pred[] {
  %q = (s32[], f32[33554432], bf16[8388608]) parameter(0)
  ROOT %c = pred[] constant(true)
}
""".replace("GROUPS", GROUPS)


def test_a_loop_takes_as_often_the_time_of_its_body():
  known = 'backend_config={"known_trip_count":{"n":"12"}}'
  loop = (
    f"  %l = (s32[], f32[33554432], bf16[8388608]) while(%x), condition=%limit, body=%body, {known}"
  )
  found = seconds(program(loop, LOOP))
  assert found.total == pytest.approx(12 * (KERNEL + GATHER), rel=1e-3)
  assert found.kernels == pytest.approx(12 * KERNEL, rel=1e-3)


def test_a_collective_across_nodes_uses_the_slow_network():
  gather = "  %g = bf16[134217728] all-gather(%w), replica_groups=[1,16]<=[16], dimensions={0}"
  expected = interconnect.gather(NETWORK, Group(8, 2, 8), 16 * 2 * 8388608)
  assert seconds(program(gather), 16).total == pytest.approx(expected)
  send = "  %g = bf16[8388608] collective-permute(%w), source_target_pairs={{0,1},{7,8}}"
  expected = interconnect.send(NETWORK, Group(1, 2, 8), 2 * 8388608)
  assert seconds(program(send), 16).total == pytest.approx(expected)


@pytest.mark.parametrize(("share", "kernels"), [(1.0, 3.0), (0.25, 1.5)])
def test_of_branches_the_longest_counts_as_often_as_it_is_taken(share, kernels):
  calls = "branch_computations={%few, %many}"
  branch = f"  %b = f32[33554432] conditional(%i, %x, %x), {calls}"
  text = ""
  for name, count in (("few", 1), ("many", 3)):
    lines = [f"  %{name}{n} = f32[33554432] negate(%x.{name})" for n in range(count)]
    parameter = f"  %x.{name} = f32[33554432] parameter(0)"
    text += f"%{name} (x: f32[33554432]) -> f32[33554432] {{\n"
    text += "\n".join([parameter, *lines]) + "\n}\n\n"
  found = seconds(program(branch, text), share_taken=share)
  assert found.total == pytest.approx(kernels * KERNEL)


def start(name: str, operand: str = "w", more: str = "") -> str:
  return f"  %{name} = (bf16[8388608], bf16[67108864]) all-gather-start(%{operand}), {GROUPS}{more}"


def done(name: str) -> str:
  return f"  %{name}.done = bf16[67108864] all-gather-done(%{name})"


def test_the_done_of_a_synchronous_start_waits_for_nothing_else():
  waits = start("q", more=', backend_config={"is_sync":true}')
  kernels = [ONE.format(f"a{number}") for number in range(40)]
  lines = [start("s"), waits, done("q"), *kernels, done("s")]
  found = seconds(program("\n".join(lines)))
  # The second gather follows the first on the network; what is left of the first is hidden.
  assert found.exposed == pytest.approx(2 * GATHER)
  assert found.total == pytest.approx(2 * GATHER + 40 * KERNEL)


@pytest.mark.parametrize("order", ["done first", "start first"])
def test_a_transfer_may_end_in_the_next_iteration(order):
  """It is carried by the loop; each iteration has one more, which its kernels hide."""
  carried = "(s32[], f32[33554432], bf16[8388608], (bf16[8388608], bf16[67108864]))"
  both = [done("c.1"), start("s.1", "w.1")]
  if order == "start first":
    both.reverse()
  kernels = [ONE.format(f"n{number}").replace("%x", "%x.1") for number in range(40)]
  body = "\n".join(
    [
      f"%body (p: {carried}) -> {carried} {{",
      f"  %p = {carried} parameter(0)",
      "  %i = s32[] get-tuple-element(%p), index=0",
      "  %x.1 = f32[33554432] get-tuple-element(%p), index=1",
      "  %w.1 = bf16[8388608] get-tuple-element(%p), index=2",
      "  %c.1 = (bf16[8388608], bf16[67108864]) get-tuple-element(%p), index=3",
      *both,
      *kernels,
      f"  ROOT %t = {carried} tuple(%i, %x.1, %w.1, %s.1)",
      "}\n",
    ]
  )
  known = 'backend_config={"known_trip_count":{"n":"12"}}'
  loop = f"  %l = {carried} while(%s), condition=%limit, body=%body, {known}"
  lines = [start("s"), loop, "  %e = bf16[67108864] all-gather-done(%l)"]
  found = seconds(program("\n".join(lines), body))
  assert found.collectives == pytest.approx(13 * GATHER, rel=1e-3)
  assert found.exposed == pytest.approx(GATHER, rel=0.01)  # Of the first alone.


def test_what_runs_beside_others_is_a_kernel_once():
  text = program(
    "  %b = ((f32[33554432]), f32[33554432]) negate-start(%x)\n  %c = f32[33554432] negate-done(%b)"
  )
  (kernel,) = hlo_kernels.kernels(text, CHIP, KernelRates())
  assert kernel.name == "b"


def test_a_fused_reduce_scatter_of_tpus_sends_the_array_once():
  tpu, network = chips.CHIPS["TPU v5e"], interconnect.NETWORKS["TPU v5e"]
  inner = (
    "%all-reduce-scatter.1 (y: bf16[16777216]) -> bf16[1048576] {\n"
    "  %y = bf16[16777216] parameter(0)\n"
    "  %r = bf16[16777216] all-reduce(%y), replica_groups=[1,16]<=[16], to_apply=%sum\n"
    "  ROOT %d = bf16[1048576] dynamic-slice(%r)\n}\n"
  )
  fused = "  %f = bf16[1048576] fusion(%w), kind=kCustom, calls=%all-reduce-scatter.1"
  devices = [Tpu(number) for number in range(16)]
  machine = Machine(tpu, network, KernelRates())
  found = program_time.predict(program(fused, inner), devices, machine)
  expected = interconnect.gather(network, Group(16, 1, 16), 2 * 16777216)
  assert found.collectives == pytest.approx(expected)


class Tpu:
  """A chip of a slice."""

  platform, device_kind, slice_index = "tpu", "TPU v5 lite", 0

  def __init__(self, number: int):
    self.id, self.process_index = number, number // 4
