# SPDX-License-Identifier: Apache-2.0
"""Set-up before JAX is first used: its platform, caches, logs and memory."""

import logging
import os
import re
import sys

from paxlike.devices import (
  gpu_targets,
  malloc,
  program_cache,
  topology,
  tpu_targets,
  xla_environment,
)


def set_up(
  *,
  platform: str | None = None,
  num_cpu_devices: int | None = None,
  gpu_plugin: bool = True,
  keep_heap: bool = True,
  cache_folder: str | os.PathLike[str] | None = None,
):
  """Sets environment variables, loggers, the allocator and JAX's configuration.

  Settings that JAX has already read have no effect. Variables that the user has set are kept, but
  flags in XLA_FLAGS that XLA does not take are left out, with a line that names them.

  Args:
    platform: The only platform of JAX, such as "cpu"; None: JAX's choice.
    num_cpu_devices: Number of CPU devices, with platform "cpu"; None: JAX's choice.
    gpu_plugin: Whether JAX may load its GPU plugin (0.3 GB), which compilation for GPUs needs.
    keep_heap: Whether steps reuse the memory of earlier ones, on a machine with only CPUs: calls
      `malloc.keep_heap`, and makes a single device compute in the calling thread, in all of this
      process.
    cache_folder: Folder of JAX's compilation cache; None: no change.

  Raises:
    UserError: The environment variable for the GPU memory fraction is invalid, or XLA_FLAGS.
  """
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  # Orbax and gcsfs log each error that they also raise, with its stack; asyncio logs errors of
  # tasks that are no longer awaited.
  for name in ("absl", "asyncio", "gcsfs"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  if not os.path.exists("/dev/nvidiactl"):
    # Without GPUs, JAX would log an error if its GPU plugin is installed.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  if gpu_plugin:
    topology.check_gpu_share()
  else:
    gpu_targets.leave_out()
  keeps_heap = False
  if not tpu_targets.has_tpus():
    tpu_targets.settle()
    has_gpu = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
    keeps_heap = keep_heap and not has_gpu and not has_started()
  if not has_started() and (problem := xla_environment.settle()):
    print(f"paxlike: {problem}", file=sys.stderr, flush=True)
  if num_cpu_devices is not None or os.environ.get("JAX_PLATFORMS") == "cpu":
    # XLA:CPU crashes when it promotes bfloat16 all-reduces from gradients of jax.shard_map to
    # float32. The pass is not needed.
    theirs, ours = os.environ.get("XLA_FLAGS", ""), "--xla_disable_hlo_passes=all-reduce-promotion"
    if ours not in theirs.split():
      os.environ["XLA_FLAGS"] = f"{ours} {theirs}".strip()
  devices = num_cpu_devices or _asked_for()
  if devices > 1 and "PJRT_NPROC" not in os.environ:
    # The number of XLA's threads: with too few, all may wait in different collectives, a deadlock.
    os.environ.setdefault("NPROC", str(max(8 * devices, os.cpu_count() or 1)))
  if keeps_heap:
    malloc.keep_heap(of_all_threads=devices > 1)
  # From here on JAX is imported.
  if keeps_heap and devices <= 1:
    import jax

    # Else another thread would compute, whose arena does not keep large blocks.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
  if cache_folder is not None:
    program_cache.enable(os.fspath(cache_folder))
  if platform is not None or num_cpu_devices is not None:
    import jax

    jax.config.update("jax_platforms", "cpu" if num_cpu_devices is not None else platform)
    if num_cpu_devices is not None:
      jax.config.update("jax_num_cpu_devices", num_cpu_devices)


def _asked_for() -> int:
  """Returns the number of CPU devices that JAX's own variables ask for; 0: none."""
  flags = os.environ.get("XLA_FLAGS", "")
  by_flag = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
  given = os.environ.get("JAX_NUM_CPU_DEVICES", "")
  return int(given) if given.isdecimal() else int(by_flag[-1]) if by_flag else 0


def has_started() -> bool:
  """Returns whether JAX's backends are already initialized in this process."""
  bridge = sys.modules.get("jax._src.xla_bridge")
  return bridge is not None and bridge.backends_are_initialized()
