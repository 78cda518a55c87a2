# SPDX-License-Identifier: Apache-2.0
import signal
import types

import pytest

from paxlike.processes import job_watch
from paxlike.processes.signals import StopSignal

both = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@both
def test_a_signal_is_noted_and_not_obeyed(number):
  with StopSignal() as stop:
    assert not stop.requested()
    assert stop.number is None
    signal.raise_signal(number)
    assert stop.requested()
    assert stop.number == number


def test_a_second_ctrl_c_is_obeyed():
  with StopSignal() as stop:
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert stop.requested()


def test_a_second_termination_does_not_cut_the_save_short():
  with StopSignal() as stop:
    for _ in range(3):
      signal.raise_signal(signal.SIGTERM)
  assert stop.number == signal.SIGTERM


@both
def test_what_was_there_before_is_put_back(number):
  seen = []
  handler = signal.signal(number, lambda number, frame: seen.append(number))
  try:
    with pytest.raises(ZeroDivisionError), StopSignal():
      signal.raise_signal(number)
      _ = 1 / 0
    assert seen == []
    signal.raise_signal(number)
    assert seen == [number]
  finally:
    signal.signal(number, handler)


@both
def test_a_signal_that_comes_after_the_others_have_stopped_is_ignored(number, monkeypatch):
  watch = types.SimpleNamespace(is_alone=False, stops_here=lambda times: True)
  monkeypatch.setattr(job_watch, "current", lambda: watch)
  seen = []
  before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
  signal.signal(number, lambda number, frame: seen.append(number))
  try:
    with StopSignal() as stop:
      assert stop.requested()
    signal.raise_signal(number)
    assert seen == [] and stop.number == signal.SIGTERM
  finally:
    for one, handler in before.items():
      signal.signal(one, handler)
