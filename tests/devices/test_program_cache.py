# SPDX-License-Identifier: Apache-2.0
"""JAX's cache of compiled programs, beside programs for devices that are not attached."""

import jax
import jax.numpy as jnp
import pytest
from helpers.program import run
from jax.experimental.compilation_cache import compilation_cache

from paxlike.devices import program_cache, topology, xla_flags
from paxlike.errors import UserError
from paxlike.training.execution import Execution


@pytest.fixture
def folder(tmp_path):
  """An empty cache that keeps every program, keyed as JAX does by default."""
  options = {
    "jax_compilation_cache_dir": str(tmp_path),
    "jax_compilation_cache_include_metadata_in_key": False,
    "jax_persistent_cache_min_compile_time_secs": 0,
  }
  before = {name: getattr(jax.config, name) for name in options}
  for name, value in options.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield tmp_path
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def _compile(number: int):
  jax.jit(lambda x: x * number).lower(jnp.float32(1)).compile()


@pytest.mark.parametrize("used_before", [False, True])
def test_only_programs_of_attached_devices_are_kept(folder, used_before):
  """JAX decides at its first compilation whether it uses the cache, and keeps to it."""
  if used_before:
    _compile(2)
  kept = set(folder.iterdir())
  assert bool(kept) is used_before
  with topology.target("v5e-4"):
    (device, *_) = topology.devices()
    xla_flags.are_known.cache_clear()
    assert xla_flags.are_known((("xla_tpu_scoped_vmem_limit_kib", 1024),), device)
  assert set(folder.iterdir()) == kept
  with program_cache.usable(jax.devices()[0]):
    _compile(3)
  assert set(folder.iterdir()) > kept


def test_a_program_of_other_scopes_is_not_taken_from_the_cache(folder):
  def compiled(scope: str) -> str:
    def scaled(x):
      with jax.named_scope(scope):
        return x * 7

    return jax.jit(scaled).lower(jnp.float32(1)).compile().as_text() or ""

  assert "/before/" in compiled("before")
  assert "/before/" in compiled("after")  # The cache ignores it; if not, the context can go.
  with program_cache.by_metadata():
    assert "/after/" in compiled("after")
  assert list(folder.iterdir())


@pytest.mark.parametrize(
  ("flags", "scopes"),
  [
    (("--mode=compile", "--topology=h100-1"), False),
    (("--mode=compile", "--topology=h100-1", "--kernels"), True),
    (("--mode=profile",), True),
  ],
)
def test_pages_of_kernels_have_the_scopes_of_this_program(
  folder, flags, scopes, monkeypatch, capsys
):
  """Otherwise the step of an attached device may come from the cache with those of older code."""
  del folder

  def compiles(*args, **options):
    raise UserError(str(jax.config.jax_compilation_cache_include_metadata_in_key))  # pyright: ignore

  monkeypatch.setattr(Execution, "compile_step", compiles)
  assert run("--fdl_config=Gpt3_52k", *flags) == 2
  assert capsys.readouterr().err == f"paxlike: {scopes}\n"
