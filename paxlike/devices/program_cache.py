# SPDX-License-Identifier: Apache-2.0
"""JAX's persistent compilation cache: where it is, and when it must not be used."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

FOLDER = "JAX_COMPILATION_CACHE_DIR"  #: The variable by which users name the folder.
_LEAST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"  # And what is worth caching.


def enable(folder: str):
  """Has JAX keep compiled programs in `folder`, unless the user names another."""
  import jax

  if FOLDER not in os.environ:
    jax.config.update("jax_compilation_cache_dir", folder)
  if _LEAST not in os.environ:
    # Also the many small programs, which together take as long as the step on a small machine.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def disable():
  """Has JAX compile all programs anew from now on."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  jax.config.update("jax_enable_compilation_cache", False)
  # JAX decides at its first compilation whether it uses the cache, and keeps to it.
  compilation_cache.reset_cache()


@contextlib.contextmanager
def usable(device: Any) -> Iterator[None]:
  """Context of compilations for a device: without the cache if the device is not attached.

  JAX would write the program of an unattached device, and fail to load it the next time.
  """
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  config: Any = jax.config
  before = config.jax_enable_compilation_cache
  if not before or device in jax.devices():
    yield
    return
  disable()
  try:
    yield
  finally:
    config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
