# SPDX-License-Identifier: Apache-2.0
"""Set-up before JAX is first used: its platform, caches and logs, and joining the job's processes.

If Python code calls paxlike, JAX may already be initialized; settings that it would no longer read
are then skipped.
"""

import gc
import os
from typing import Any

from paxlike.cli import flags
from paxlike.devices import jax_setup, program_cache, tpu_targets
from paxlike.errors import UserError
from paxlike.processes import cluster

_collection_is_postponed = False


def postpone_garbage_collection():
  """Disables the garbage collector until it is resumed, and lets it run rarely afterwards.

  Importing and tracing leave millions of objects alive, which it would scan again and again.
  """
  global _collection_is_postponed
  _collection_is_postponed = True
  gc.disable()
  gc.set_threshold(50_000, 10, 10)


def resume_garbage_collection():
  """Enables the garbage collector if it was postponed.

  It never scans objects that exist now, so that cycles among them are never freed.
  """
  global _collection_is_postponed
  if _collection_is_postponed:
    _collection_is_postponed = False
    gc.freeze()
    gc.enable()


def set_up_jax(options: flags.Options):
  """Configures JAX, TensorFlow and TFDS, and joins the other processes of the job.

  The target devices of `options` are set by `topology.target`.

  Raises:
    UserError: Options or the environment are wrong.
    TemporaryError: Other processes do not join in time.
  """
  from paxlike.data import token_index

  if options.tfds_data_dir:
    os.environ["TFDS_DATA_DIR"] = options.tfds_data_dir
  target, topologies = options.topology, options.topologies
  jax_setup.set_up(
    platform=None if target is None else "cpu",
    num_cpu_devices=options.num_cpu_devices,
    gpu_plugin=not topologies or not all(map(tpu_targets.names_tpus, topologies)),
    keep_heap=target is None,
    cache_folder=token_index.cache_folder() / "xla",
  )
  join(options)


def join(options: flags.Options):
  """Joins the other processes of the job, if there are any and the mode needs them.

  Does nothing in a process that has already joined.

  Raises:
    UserError: `--multiprocess_gpu` is set and no processes are found, a flag differs between
      processes, or JAX is already initialized in this one alone.
    TemporaryError: Other processes do not join in time.
  """
  import jax

  alone = options.list or options.fdl_help or options.mode == "show"
  if options.topology is not None or alone or jax.distributed.is_initialized():
    return
  on_cpu = {} if options.num_cpu_devices is None else {"JAX_PLATFORMS": "cpu"}
  environ = os.environ | on_cpu
  given: Any = (options.server_addr, options.num_hosts, options.host_idx)
  is_given = None not in given
  if is_given:
    group = cluster.ProcessGroup(*given, devices=cluster.own_gpus(environ))
  else:
    group = cluster.detect(environ)
  of_tpus = tpu_targets.has_tpus() and not is_given
  if options.multiprocess_gpu and group is None and not of_tpus:
    raise UserError(
      "--multiprocess_gpu: found no cluster (Slurm, Open MPI, Kubernetes, TPUs):"
      " give --server_addr=HOST:PORT --num_hosts=N --host_idx=I."
    )
  if group is None and of_tpus:
    joins = options.multiprocess_gpu or cluster.num_tpu_processes() > 1
  else:
    joins = group is not None and group.count > 1
  if joins and jax_setup.has_started():
    raise UserError(
      "the cluster has other processes, but JAX has started in this one alone: call paxlike.train"
      " or paxlike.load before anything uses JAX's devices."
    )
  if joins:
    from paxlike.processes import multiprocess

    multiprocess.initialize(
      group,
      timeout=60 if options.heartbeat_timeout is None else options.heartbeat_timeout,
      join_timeout=300 if options.join_timeout is None else options.join_timeout,
      flags=flags.shared(options),
    )
    has_gpus = cluster.num_gpus() and environ.get("JAX_PLATFORMS") != "cpu"
    several_nodes = group is not None and cluster.local_rank_and_size(environ)[1] < group.count
    if has_gpus and several_nodes and program_cache.FOLDER not in environ:
      # Processes share GPU autotuning (`xla_gpu_shard_autotuning`, on by default; XLA's pull
      # requests 14968 and 22164), and only process 0 writes the cache (jax/_src/compiler.py). If
      # each node has its own disk, then after a restart process 0 reads the program from its cache
      # without autotuning, and the others wait for its results. A cache folder that the user sets
      # is assumed to be shared by all processes.
      program_cache.disable()
