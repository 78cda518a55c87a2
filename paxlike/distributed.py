# SPDX-License-Identifier: Apache-2.0
"""Starting JAX as one of several processes."""

import jax

from paxlike.errors import UserError


def initialize(address: str | None, num_processes: int | None, index: int | None):
  """Joins the other processes; what is None is found out from the cluster (Slurm, Open MPI).

  Raises:
    UserError: Neither arguments nor environment say who the others are, or they do not come.
  """
  try:
    jax.distributed.initialize(address, num_processes, index)
  except (ValueError, RuntimeError) as error:
    raise UserError(
      f"--multiprocess_gpu could not join the other processes: {error} Outside a cluster that JAX"
      " knows, give --server_addr=HOST:PORT --num_hosts=N --host_idx=I."
    ) from error
