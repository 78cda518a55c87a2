# SPDX-License-Identifier: Apache-2.0
"""Options of XLA by which steps are compiled for GPUs.

They go with the program, not into XLA_FLAGS, where a name that is not known ends the process.
"""

import functools
from typing import Any

import jax

from paxlike import topology

# XLA's own products of matrices replace those of cuBLAS, and FP8 is lost where they do.
SINGLE: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
# Communication hides behind computation.
SEVERAL: dict[str, Any] = SINGLE | {
  "xla_gpu_enable_latency_hiding_scheduler": True,
  "xla_gpu_enable_pipelined_all_gather": True,
  "xla_gpu_enable_pipelined_reduce_scatter": True,
  "xla_gpu_enable_pipelined_all_reduce": True,
}


def options() -> tuple[dict[str, Any], list[str]]:
  """Returns the options for the devices that programs are made for, and the names left out.

  What is left out is what this version of JAX does not know. Other devices than GPUs have none.
  """
  devices = topology.devices()
  if devices[0].platform not in ("gpu", "cuda"):
    return {}, []
  wanted = SINGLE if len(devices) == 1 else SEVERAL
  known = {name: value for name, value in wanted.items() if is_known(name, value)}
  return known, sorted(wanted.keys() - known.keys())


@functools.cache
def is_known(name: str, value: Any) -> bool:
  """Returns whether this version of JAX has an option of this name."""
  lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "int32"))
  try:
    lowered.compile(compiler_options={name: value})
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    return False
  return True
