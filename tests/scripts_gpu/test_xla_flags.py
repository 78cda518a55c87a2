# SPDX-License-Identifier: Apache-2.0
"""Options of XLA, as what compiles for each kind of device takes them."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlike.compilation import hlo_collectives
from paxlike.devices import topology, xla_flags
from paxlike.devices.mesh import MeshSpec


@pytest.fixture
def v5e() -> Iterator[None]:
  with topology.target("v5e-4"):
    yield


def test_training_on_cpus_has_none():
  assert xla_flags.options() == ({}, [])


def test_prompts_on_one_cpu_have_options(monkeypatch):
  ours = dict(xla_flags.PREFILL_ON_CPU)
  assert ours and xla_flags.prefill_options() == ours
  with jax.set_mesh(MeshSpec(ici=(1, 2, 1)).build(jax.devices()[:2])):
    assert not xla_flags.prefill_options()
  monkeypatch.setitem(xla_flags.PREFILL_ON_CPU, "xla_cpu_no_such_option", True)
  assert xla_flags.prefill_options() == ours
  monkeypatch.setattr(xla_flags, "PREFILL_ON_CPU", dict.fromkeys(ours, "NO_SUCH_VALUE"))
  assert not xla_flags.prefill_options()


@pytest.mark.parametrize(
  "flag",
  ["scheduler_type=CPU_SCHEDULER_TYPE_DEFAULT", "enable_concurrency_optimized_scheduler=false"],
)
def test_the_order_on_cpus_that_the_user_gives_wins(monkeypatch, flag):
  monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_{flag}")
  assert not xla_flags.prefill_options()


def test_initial_states_on_cpus_have_options_that_the_user_may_give(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "")
  ours = xla_flags.initialization_options()
  assert ours and xla_flags.are_known(tuple(ours.items()), jax.devices()[0])
  monkeypatch.setitem(xla_flags.INITIALIZATION_ON_CPU, "xla_no_such_option", True)
  assert xla_flags.initialization_options() == ours
  monkeypatch.setenv("XLA_FLAGS", " ".join(f"--{name}=0" for name in ours))
  assert not xla_flags.initialization_options()
  with topology.target("h200-1"):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert not xla_flags.initialization_options()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v4-8", "v5e-4", "v5p-128", "v6e-4", "v7x-8"])
def test_libtpu_takes_the_options_for_several_tpus(target):
  with topology.target(target):
    options, dropped = xla_flags.options()
    assert not dropped
    program = _multiply(topology.devices(), options)
  found = hlo_collectives.instructions(program.text, program.devices)
  # v4 gathers before it computes.
  assert [(one.kind, one.is_async) for one in found] == [("all-gather", target != "v4-8")]
  assert ('"DEVICE_TYPE_SPARSECORE"' in program.text) == target.startswith(("v5p", "v6e", "v7x"))


class _Program(NamedTuple):
  text: str
  devices: Mesh


def _multiply(devices: Sequence[Any], options: xla_flags.Options) -> _Program:
  """Returns a program that gathers a weight while it computes something else."""
  mesh = Mesh(np.array(devices).reshape(-1, 4), ("data", "fsdp"))
  sharded, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in [("fsdp",), ()])
  shardings = (sharded, whole, sharded)
  shape = (8192, 8192)
  x, v, w = (jax.ShapeDtypeStruct(shape, "bfloat16", sharding=one) for one in shardings)

  @functools.partial(jax.jit, out_shardings=sharded)
  def step(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ v) @ jax.lax.with_sharding_constraint(w, whole)

  text = step.lower(x, v, w).compile(compiler_options=options).as_text()
  return _Program(text or "", mesh)


def test_options_that_libtpu_does_not_know_are_dropped(v5e, monkeypatch):
  unknown = {"xla_tpu_no_such_option": True}
  monkeypatch.setitem(xla_flags.SEVERAL_V5E, "xla_tpu_no_such_option", True)
  known, dropped = xla_flags.options()
  assert dropped == [*unknown] and not known.keys() & unknown.keys()


def test_one_tpu_sends_nothing():
  with topology.target("v5e-1"):
    assert xla_flags.options() == ({}, [])


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
@pytest.mark.parametrize("flag", ["--{}=false", "--no{}", "--other --{}"])
def test_what_the_user_gives_wins(v5e, monkeypatch, variable, flag):
  first, *others = xla_flags.SEVERAL_V5E
  # Not for XLA itself, which has read the variables by now.
  assert set(xla_flags.options()[0]) == {first, *others}
  monkeypatch.setenv(variable, flag.format(first))
  assert set(xla_flags.options()[0]) == set(others)
