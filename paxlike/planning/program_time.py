# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a compiled step: its own kernels and collectives on a timeline.

Instructions run in the order of the program's text. There are three streams: computation, and one
for each network. A kernel takes its roofline time (`hlo_kernels`), a collective the time of its
bytes and steps (`interconnect`). A synchronous collective keeps computation waiting; one that is
asynchronous runs from its start on, when its network is free, and only its done waits. On GPUs,
kernels beside a transfer are slower (`Fitted.contention`). Of a loop, three iterations are
simulated, and the last is repeated.

What no text shows is missing: launches that the host delays, and waiting for the slowest device.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paxlike.compilation import hlo_collectives, hlo_kernels, hlo_text
from paxlike.compilation.hlo_text import COLLECTIVES, Computations, Instruction, computations
from paxlike.devices import interconnect
from paxlike.devices.interconnect import Group, Network
from paxlike.planning.machines import Machine

_SIMULATED = 3  # Iterations of a loop.


class ProgramTime(NamedTuple):
  """The predicted seconds of a program.

  Attributes:
    total: Of a run.
    kernels: Of its kernels, one after another.
    collectives: Of its collectives, one after another.
    exposed: In which computation waits for collectives.
    optimizer: In which the optimizer's kernels and collectives run.
  """

  total: float
  kernels: float
  collectives: float
  exposed: float
  optimizer: float = 0.0

  def times(self, count: float) -> "ProgramTime":
    """Returns this, `count` times."""
    return ProgramTime(*(count * seconds for seconds in self))

  def plus(self, other: "ProgramTime") -> "ProgramTime":
    """Returns the sum of two."""
    return ProgramTime(*(a + b for a, b in zip(self, other, strict=True)))


_NOTHING = ProgramTime(0.0, 0.0, 0.0, 0.0)


def predict(
  program: str, devices: Sequence[Any], machine: Machine, *, share_taken: float = 1.0
) -> ProgramTime:
  """Returns the predicted seconds of a compiled program.

  Args:
    program: The HLO text.
    devices: The devices that it is compiled for, in the order of their mesh.
    machine: The rates that they reach.
    share_taken: How often a conditional takes its longest branch rather than its shortest, 0 to 1;
      the same for all of the program's.
  """
  kernels = hlo_kernels.kernels(program, machine.chip, machine.rates)
  found = computations(program)
  costs = {one.name: one.seconds for one in kernels if one.group != "communication"}
  timeline = _Timeline(found, costs, _Links(devices, machine.network), machine, share_taken)
  return timeline.run("", _State())


@dataclasses.dataclass
class _State:
  """When streams are free, and the transfers in flight: seconds, from the start of a computation.

  Attributes:
    busy_until: Name of a network -> when it is free.
    ends: Name of a transfer -> when it ends.
  """

  busy_until: dict[str, float] = dataclasses.field(default_factory=dict)
  ends: dict[str, float] = dataclasses.field(default_factory=dict)

  def later(self, seconds: float) -> "_State":
    """Returns the same, with times counted from so many seconds later."""
    return _State(
      {name: max(0.0, time - seconds) for name, time in self.busy_until.items()},
      {name: max(0.0, time - seconds) for name, time in self.ends.items()},
    )


class _Links:
  """The networks between devices."""

  def __init__(self, devices: Sequence[Any], network: Network):
    self._network = network
    # The slice or node of each device.
    self._place = [interconnect.place(device) for device in devices]
    self.is_torus = network.dims > 0
    self._within = len(self._place) // len(set(self._place))

  def transfer(self, one: Instruction, kind: str) -> tuple[str, float]:
    """Returns (the name of the slowest network, seconds) of a collective."""
    groups = hlo_collectives.groups(one.attributes, len(self._place))
    group = max((self._group(devices) for devices in groups), key=lambda group: group.outer)
    if group.size == 1:
      return "", 0.0
    name = self._network.names[group.outer > 1]
    nbytes = hlo_collectives.result_bytes(one)
    if kind == "collective-permute":
      return name, interconnect.send(self._network, group, nbytes)
    if kind == "all-reduce":
      return name, interconnect.reduce(self._network, group, nbytes)
    if kind in ("all-to-all", "ragged-all-to-all"):
      return name, interconnect.exchange(self._network, group, nbytes)
    # A fused reduce-scatter of TPUs holds an all-reduce, whose result is the whole array.
    whole = nbytes * (group.size if one.operation.startswith("reduce-scatter") else 1)
    return name, interconnect.gather(self._network, group, whole)

  def _group(self, devices: list[int]) -> Group:
    outer = len({self._place[device] for device in devices})
    return Group(max(1, len(devices) // outer), outer, self._within)


class _Timeline:
  def __init__(
    self,
    found: Computations,
    costs: Mapping[str, float],
    links: _Links,
    machine: Machine,
    share_taken: float,
  ):
    self._computations, self._costs, self._links = found, costs, links
    self._share_taken = share_taken
    self._waited_for: set[str] = set()  # Starts of synchronous collectives.
    self._contention = machine.fitted.contention if machine.chip.is_gpu else 0.0

  def run(self, name: str, state: _State) -> ProgramTime:
    """Simulates a computation; `state` becomes that at its end."""
    now, sums = 0.0, _NOTHING
    for one in self._computations.get(name, ()):
      spent = self._instruction(one, state.later(now), now, state)
      if hlo_text.OPTIMIZER in one.op_name and not spent.optimizer:
        spent = spent._replace(optimizer=spent.total)
      now += spent.total
      sums = sums.plus(spent)
    end = state.later(now)
    state.busy_until, state.ends = end.busy_until, end.ends
    return sums

  def _instruction(self, one: Instruction, here: _State, now: float, state: _State) -> ProgramTime:
    """Returns the time of an instruction that begins at `now`; adds its transfers to `state`.

    `here` is the state as seen from `now`.
    """
    if one.operation == "while":
      return self._loop(one, here, now, state)
    moved = self._collective(one)
    if one.operation in ("call", "conditional") or (one.operation == "async-start" and not moved):
      return self._branches(one, here, now, state)
    spent = self._kernel(self._costs.get(one.name, 0.0), here)
    is_done = one.operation.endswith("-done") and one.operation.startswith((*COLLECTIVES, "async"))
    if is_done or self._holds(one, "AsyncCollectiveDone"):
      return spent.plus(self._done(one, here, state, spent.total))
    if moved is None:
      return spent
    kind, inner, key = moved
    if key in here.ends and one.operation == "fusion":  # A further part of what has begun.
      return spent
    if key in state.ends:  # Of the iteration before: its done follows.
      state.ends = {f"{k} before" if k == key else k: end for k, end in state.ends.items()}
    network, seconds = self._links.transfer(inner, kind)
    # Permutes use single links of a torus, others all.
    shares = kind == "collective-permute" and self._links.is_torus
    begin = 0.0 if shares else here.busy_until.get(network, 0.0)
    is_async = one.operation.endswith("-start") or self._holds(one, "AsyncCollectiveStart")
    if is_async and '"is_sync":true' not in one.attributes:
      state.ends[key] = now + begin + seconds
      busy = state.busy_until.get(network, 0.0)
      state.busy_until[network] = max(busy, state.ends[key])
      return spent.plus(_NOTHING._replace(collectives=seconds))
    self._waited_for.add(one.name)
    waited = max(0.0, begin - spent.total) + seconds
    end = now + spent.total + waited
    state.busy_until[network] = max(end, state.busy_until.get(network, 0.0))
    return spent.plus(ProgramTime(waited, 0.0, seconds, waited))

  def _kernel(self, seconds: float, here: _State) -> ProgramTime:
    beside = min(seconds, max(here.busy_until.values(), default=0.0))
    return ProgramTime(seconds + self._contention * beside, seconds, 0.0, 0.0)

  def _done(self, one: Instruction, here: _State, state: _State, spent: float) -> ProgramTime:
    """Waits for a transfer: that of its operand, else the oldest, begun in an iteration before.

    `spent` is the time that the instruction itself takes.
    """
    if not self._waited_for.isdisjoint(one.operands):
      return _NOTHING
    keys = [name for name in one.operands if name in here.ends]
    channel = self._channel(one)
    keys += [channel] if channel in here.ends else []
    key = next(iter(keys or here.ends), None)
    if key is None:
      return _NOTHING
    state.ends.pop(key)
    waited = max(0.0, here.ends[key] - spent)
    return ProgramTime(waited, 0.0, 0.0, waited)

  def _loop(self, one: Instruction, here: _State, now: float, state: _State) -> ProgramTime:
    count = one.times(self._computations)
    body = one.called[0]
    sums, last = _NOTHING, _NOTHING
    for _ in range(min(count, _SIMULATED)):
      last = self.run(body, here)
      sums = sums.plus(last)
    sums = sums.plus(last.times(max(0, count - _SIMULATED)))
    self._continue(here, now + sums.total, state)
    return sums

  def _branches(self, one: Instruction, here: _State, now: float, state: _State) -> ProgramTime:
    """Simulates what an instruction calls.

    Of a conditional, the time is the mean of its shortest and longest branch, by how often they are
    taken; transfers in flight are those of the longest.
    """
    branches = []
    for name in one.called:
      after = _State(dict(here.busy_until), dict(here.ends))
      branches.append((self.run(name, after), after))
    branches.sort(key=lambda branch: branch[0].total)
    (shortest, _), (longest, after) = branches[0], branches[-1]
    spent = shortest.times(1 - self._share_taken).plus(longest.times(self._share_taken))
    self._continue(after, now + spent.total, state)
    return spent

  def _continue(self, inner: _State, end: float, state: _State):
    """Sets the state to that at the end of an inner computation."""
    state.busy_until = {name: end + time for name, time in inner.busy_until.items()}
    state.ends = {name: end + time for name, time in inner.ends.items()}

  def _collective(self, one: Instruction) -> tuple[str, Instruction, str] | None:
    """Returns (kind, instruction, name of the transfer) of the collective in an instruction."""
    kind = next((kind for kind in COLLECTIVES if one.operation.startswith(kind)), None)
    if kind is not None:
      return kind, one, one.name
    if one.operation not in ("async-start", "fusion"):
      return None
    for name in one.called:
      for inner in self._computations.get(name, ()):
        if (found := self._collective(inner)) is not None:
          kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else found[0]
          is_fused = one.operation == "fusion"
          return kind, found[1], (self._channel(found[1]) or one.name) if is_fused else one.name
    return None

  def _channel(self, one: Instruction) -> str:
    """Returns the channel of a collective, or of that inside a fusion; empty if there is none."""
    if (channel := hlo_collectives.channel(one)) is not None:
      return f"channel {channel}"
    for name in one.called if one.operation == "fusion" else ():
      for inner in self._computations.get(name, ()):
        if found := self._channel(inner):
          return found
    return ""

  def _holds(self, one: Instruction, target: str) -> bool:
    return one.operation == "fusion" and any(
      inner.target == target or self._holds(inner, target)
      for name in one.called
      for inner in self._computations.get(name, ())
    )
