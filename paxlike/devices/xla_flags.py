# SPDX-License-Identifier: Apache-2.0
"""XLA compiler options: for GPUs and TPUs, and for initial states and prompts on CPUs.

They are passed per program instead of through XLA_FLAGS or LIBTPU_INIT_ARGS, where an unknown name
aborts the process. Per-program options take precedence over both variables, so options that the
user has set there are omitted.
"""

import functools
import os
import re
from typing import Any

import jax

from paxlike.devices import chips, mesh, program_cache, topology

Options = dict[str, Any]

# GPUs.
# XLA would replace cuBLAS by its Triton matmuls, which do not multiply in FP8.
ONE_GPU: Options = {"xla_gpu_enable_triton_gemm": False}
# Overlap communication with computation. All-gathers are not moved into the iteration before
# (xla_gpu_enable_pipelined_all_gather): programs take up to a third more memory, and most of them
# no less time (docs/results.md).
SEVERAL_GPUS: Options = ONE_GPU | {
  "xla_gpu_enable_latency_hiding_scheduler": True,
  "xla_gpu_enable_pipelined_reduce_scatter": True,
  "xla_gpu_enable_pipelined_all_reduce": True,
}

# TPUs, from MaxText's sets (benchmarks/xla_flags_library.py). None helps v4; v7x needs none.
# v5e fuses all-gathers with matmuls by default. This fuses all-reduces too; only both options
# together have an effect. In the loops of Scaled16BV5e256, synchronous all-reduces go from 11 to 4.
# libtpu 0.0.52 refuses such fusions on other TPUs, where they may hang or compute wrong results.
SEVERAL_V5E: Options = {
  "xla_enable_async_all_reduce": True,
  "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}
# SparseCores communicate while the other cores compute. In Scaled32BV5p128 (libtpu 0.0.42), 15.8 of
# 260 GB are sent synchronously; without any options, 188.
WITH_SPARSE_CORES: Options = {
  "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
  "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
  "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
}
# By name in `chips.CHIPS`.
_OF_TPUS = {
  "TPU v5 lite": SEVERAL_V5E,
  "TPU v5e": SEVERAL_V5E,
  "TPU v5p": WITH_SPARSE_CORES,
  "TPU v5": WITH_SPARSE_CORES,
  "TPU v6": WITH_SPARSE_CORES,
}

# CPUs. By default, XLA converts the quantized weights of all layers before it computes the first.
PREFILL_ON_CPU: Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
_FORMER_NAME = "xla_cpu_enable_concurrency_optimized_scheduler"
# By default, LLVM unrolls the loops that draw small arrays of random numbers. These programs then
# compile for three times as long and run no faster; nor do the newer emitters of fusions make them
# faster (JAX 0.12 has no others), or parts that are compiled by several threads.
INITIALIZATION_ON_CPU: Options = {
  "xla_backend_optimization_level": 1,
  "xla_cpu_parallel_codegen_split_count": 1,
  "xla_cpu_use_fusion_emitters": False,
}


def options() -> tuple[Options, list[str]]:
  """Returns the options for the target devices, and the names that this version of XLA lacks.

  For CPUs there are none; see `prefill_options` and `initialization_options`.
  """
  devices = topology.devices()
  wanted = _wanted(devices[0], len(devices))
  known = _known(wanted, devices[0])
  return known, sorted(wanted.keys() - known.keys())


def fuses_all_reduces() -> bool:
  """Returns whether XLA computes an all-reduce beside a matmul in one kernel: on TPU v5e."""
  return _OF_TPUS.get(chips.name(topology.devices()[0].device_kind) or "") is SEVERAL_V5E


def prefill_options() -> Options:
  """Returns the options for reading prompts on one CPU; with collectives, XLA chooses the order."""
  device = topology.devices()[0]
  if device.platform != "cpu" or mesh.sizes_here(mesh.AXES):
    return {}
  names = PREFILL_ON_CPU | {_FORMER_NAME: True}
  return _known(PREFILL_ON_CPU, device) if _not_given(names) == names else {}


def initialization_options() -> Options:
  """Returns the options for programs that initialize weights and the state of an optimizer."""
  device = topology.devices()[0]
  return _known(_not_given(INITIALIZATION_ON_CPU), device) if device.platform == "cpu" else {}


def _known(wanted: Options, device: Any) -> Options:
  # Each answer takes a compilation, and usually all are known.
  if not wanted or are_known(tuple(wanted.items()), device):
    return dict(wanted)
  return {name: value for name, value in wanted.items() if are_known(((name, value),), device)}


def _wanted(device: Any, num_devices: int) -> Options:
  """Returns the options for devices like this one that the user has not set."""
  if device.platform in ("gpu", "cuda"):
    ours = ONE_GPU if num_devices == 1 else SEVERAL_GPUS
  elif device.platform == "tpu" and num_devices > 1:
    ours = _OF_TPUS.get(chips.name(device.device_kind) or "", {})
  else:
    return {}
  return _not_given(ours)


def _not_given(ours: Options) -> Options:
  """Returns those of our options that the user has not set."""
  theirs = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
  given = re.findall(r"--(?:no)?(xla_\w+)", theirs)
  return {name: value for name, value in ours.items() if name not in given}


@functools.cache
def are_known(wanted: tuple[tuple[str, Any], ...], device: Any) -> bool:
  """Returns whether the compiler for `device` has all options of these names and values."""
  # XLA accepts the GPU options on any platform; only libtpu accepts those for TPUs.
  where = jax.sharding.SingleDeviceSharding(device) if device.platform == "tpu" else None
  lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "int32", sharding=where))
  try:
    with program_cache.usable(device):
      lowered.compile(compiler_options=dict(wanted))
  except jax.errors.JaxRuntimeError as error:
    if not re.search("No such compile option|is not a valid enum value", str(error)):
      raise
    return False
  return True
