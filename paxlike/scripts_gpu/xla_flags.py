# SPDX-License-Identifier: Apache-2.0
"""Options of XLA by which steps are compiled, for GPUs and TPUs.

They go with the program, not into XLA_FLAGS or LIBTPU_INIT_ARGS, where an unknown name ends the
process. XLA would prefer the program's options to those of the two variables, so one that the user
gives there is left out here.
"""

import functools
import os
import re
from typing import Any

import jax

from paxlike import topology

Options = dict[str, Any]

# GPUs.
# XLA's own matmuls would replace those of cuBLAS, and FP8 is lost where they do.
ONE_GPU: Options = {"xla_gpu_enable_triton_gemm": False}
# Communication runs beside computation.
SEVERAL_GPUS: Options = ONE_GPU | {
  "xla_gpu_enable_latency_hiding_scheduler": True,
  "xla_gpu_enable_pipelined_all_gather": True,
  "xla_gpu_enable_pipelined_reduce_scatter": True,
  "xla_gpu_enable_pipelined_all_reduce": True,
}

# TPUs, of the sets that MaxText names (benchmarks/xla_flags_library.py).
# All-reduces run beside matmuls; either of the two alone changes nothing. In the loops of
# Scaled16BV5e256 11 that wait become 4, and the peak falls from 9.28 to 8.90 GB.
SEVERAL_TPUS: Options = {
  "xla_enable_async_all_reduce": True,
  "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}
# All-gathers too: on v5e they do by default. In the loops of Scaled64BV5p128 all 19 waited, which
# become 8, and 2 permutations that waited none.
SEVERAL_V5P: Options = SEVERAL_TPUS | {
  "xla_enable_async_all_gather": True,
  "xla_tpu_overlap_compute_collective_tc": True,
  "xla_tpu_enable_async_collective_fusion": True,
  "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
  "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
}


def options() -> tuple[Options, list[str]]:
  """Returns the options for the devices that programs are made for, and the names left out.

  What is left out is what this version of JAX does not know. CPUs have none.
  """
  devices = topology.devices()
  wanted = _wanted(devices[0], len(devices))
  known = {name: value for name, value in wanted.items() if is_known(name, value, devices[0])}
  return known, sorted(wanted.keys() - known.keys())


def _wanted(device: Any, num_devices: int) -> Options:
  """Returns the options for devices like this one that the user gives no value of."""
  if device.platform in ("gpu", "cuda"):
    ours = ONE_GPU if num_devices == 1 else SEVERAL_GPUS
  elif device.platform == "tpu" and num_devices > 1:
    # Both are names of the v5p; "TPU v5 lite" is the v5e.
    is_v5p = device.device_kind in ("TPU v5", "TPU v5p")
    ours = SEVERAL_V5P if is_v5p else SEVERAL_TPUS
  else:
    return {}
  theirs = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
  given = re.findall(r"--(?:no)?(xla_\w+)", theirs)
  return {name: value for name, value in ours.items() if name not in given}


@functools.cache
def is_known(name: str, value: Any, device: Any) -> bool:
  """Returns whether what compiles for a device has an option of this name."""
  # Any platform knows the options for GPUs; those for TPUs only libtpu.
  where = jax.sharding.SingleDeviceSharding(device) if device.platform == "tpu" else None
  lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "int32", sharding=where))
  config: Any = jax.config
  kept = config.jax_enable_compilation_cache
  # JAX cannot read what it kept of devices that are not here.
  config.update("jax_enable_compilation_cache", False)
  try:
    lowered.compile(compiler_options={name: value})
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    return False
  finally:
    config.update("jax_enable_compilation_cache", kept)
  return True
