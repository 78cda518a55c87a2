# SPDX-License-Identifier: Apache-2.0
"""Ranges for NVIDIA's Nsight Systems, by the C libraries that JAX's CUDA wheels bring.

`nsys profile --capture-range=cudaProfilerApi` records from cudaProfilerStart to cudaProfilerStop.
Under nsys, XLA itself names its kernels by NVTX ranges; the names of steps are added here.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from paxlike.errors import UserError

_RUNTIME, _NVTX = "libcudart.so", "libnvtx3interop.so"
_OLD_NVTX = "libnvToolsExt.so"  # The name before CUDA 13.
# nsys sets it for the programs that it starts.
_SESSION = "NSYS_PROFILING_SESSION_ID"


def check():
  """Raises a UserError if CUDA's runtime library is not found."""
  _cuda()


def hint() -> str:
  """Returns the end of a message: how to run under nsys, if this process is not."""
  if _SESSION in os.environ:
    return ""
  return "; start the program as: nsys profile --capture-range=cudaProfilerApi paxlike ..."


@contextlib.contextmanager
def range_of_capture() -> Iterator[None]:
  """Context that nsys records.

  Raises:
    UserError: CUDA refuses.
  """
  _call("cudaProfilerStart")
  try:
    yield
  finally:
    _call("cudaProfilerStop")


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
  """Context that is an NVTX range of this name; does nothing without the library."""
  library = _nvtx()
  if library is None:
    yield
    return
  library.nvtxRangePushA(name.encode())
  try:
    yield
  finally:
    library.nvtxRangePop()


def _call(function: str):
  """Calls a function of CUDA's runtime."""
  library = _cuda()
  if status := getattr(library, function)():
    library.cudaGetErrorString.restype = ctypes.c_char_p
    reason = library.cudaGetErrorString(status).decode()
    raise UserError(f"PROFILER=nsys: {function} failed: {reason} (CUDA error {status}).")


@functools.cache
def _cuda() -> Any:
  if library := _load(_RUNTIME):
    return library
  raise UserError(
    f"PROFILER=nsys: found no {_RUNTIME}; pip install 'jax[cuda13]' brings it. PROFILER=xprof needs"
    " no such library."
  )


@functools.cache
def _nvtx() -> Any:
  return _load(_NVTX) or _load(_OLD_NVTX)


def _load(name: str) -> Any:
  """Returns a library of NVIDIA's wheels or of the system; None if there is none."""
  spec = importlib.util.find_spec("nvidia")
  roots = [] if spec is None else spec.submodule_search_locations or []
  wheels = [path for root in roots for path in pathlib.Path(root).glob(f"*/lib/{name}*")]
  for path in [*map(str, sorted(wheels)), name]:
    with contextlib.suppress(OSError):
      return ctypes.CDLL(path)
  return None
