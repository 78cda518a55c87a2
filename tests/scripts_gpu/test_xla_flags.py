# SPDX-License-Identifier: Apache-2.0
"""Options of XLA, as what compiles for each kind of device takes them."""

from collections.abc import Iterator

import pytest

from paxlike.devices import topology, xla_flags


@pytest.fixture
def v5e() -> Iterator[None]:
  with topology.target("v5e-4"):
    yield


def test_cpus_have_none():
  assert xla_flags.options() == ({}, [])


def test_libtpu_takes_the_options_for_several_tpus(v5e, monkeypatch):
  with topology.target("v5p-8"):
    assert xla_flags.options() == (xla_flags.SEVERAL_V5P, [])
  assert xla_flags.options() == (xla_flags.SEVERAL_TPUS, [])
  unknown = {"xla_tpu_no_such_option": True}
  monkeypatch.setattr(xla_flags, "SEVERAL_TPUS", xla_flags.SEVERAL_TPUS | unknown)
  known, dropped = xla_flags.options()
  assert dropped == [*unknown] and not known.keys() & unknown.keys()


def test_one_tpu_sends_nothing():
  with topology.target("v5e-1"):
    assert xla_flags.options() == ({}, [])


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
@pytest.mark.parametrize("flag", ["--{}=false", "--no{}", "--other --{}"])
def test_what_the_user_gives_wins(v5e, monkeypatch, variable, flag):
  first, *others = xla_flags.SEVERAL_TPUS
  # Not for XLA itself, which has read the variables by now.
  assert set(xla_flags.options()[0]) == {first, *others}
  monkeypatch.setenv(variable, flag.format(first))
  assert set(xla_flags.options()[0]) == set(others)
