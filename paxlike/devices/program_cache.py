# SPDX-License-Identifier: Apache-2.0
"""JAX's persistent compilation cache: its folder, and when it must not be used."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

FOLDER = "JAX_COMPILATION_CACHE_DIR"  #: The environment variable for the folder.
_MIN_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def enable(folder: str):
  """Makes JAX cache compiled programs in `folder`, unless the user has set another."""
  import jax

  if FOLDER not in os.environ:
    jax.config.update("jax_compilation_cache_dir", folder)
  if _MIN_SECONDS not in os.environ:
    # Caches small programs too: on a small machine, all of them together take as long as the step.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.03)


def disable():
  """Disables the cache for all following compilations."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  jax.config.update("jax_enable_compilation_cache", False)
  # JAX decides once, at its first compilation, whether to use the cache; this resets the decision.
  compilation_cache.reset_cache()


def keeps_order(devices: Iterable[Any]) -> bool:
  """Returns whether a program that is loaded from a file runs its collectives in their order.

  On CPUs each then has a resource of its own in place of the one that ordered them
  (`CreateResourceFromProto` in xla/backends/cpu/runtime/thunk_proto_serdes.cc). Collectives of
  several processes, which find each other by their order alone, take values of others.
  """
  return len({d.process_index for d in devices if d.platform == "cpu"}) < 2


@contextlib.contextmanager
def by_metadata() -> Iterator[None]:
  """Context in which a program from the cache has the scopes and source lines of this one.

  Elsewhere the cache ignores them: a program may come from code that had other scopes, or none.
  """
  import jax

  config: Any = jax.config
  before = config.jax_compilation_cache_include_metadata_in_key
  config.update("jax_compilation_cache_include_metadata_in_key", True)
  try:
    yield
  finally:
    config.update("jax_compilation_cache_include_metadata_in_key", before)


@contextlib.contextmanager
def usable(device: Any, *, to_save: bool = False) -> Iterator[None]:
  """Returns a context for compiling for `device`, with the cache only where it can be used.

  JAX would cache a program for an unattached device, and then fail to load it. A program from the
  cache that is serialized again (`to_save`) lacks its kernels: on CPUs it fails when it runs.
  """
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  config: Any = jax.config
  before = config.jax_enable_compilation_cache
  if not before or (device in jax.devices() and not to_save):
    yield
    return
  disable()
  try:
    yield
  finally:
    config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
