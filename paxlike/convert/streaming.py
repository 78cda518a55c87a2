# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint of paxlike from a stream of arrays."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from paxlike.checkpoints import manifest
from paxlike.checkpoints.checkpoint import metadata_of
from paxlike.convert import safetensors_files
from paxlike.layers.stack_layout import Layout

# Arrays are buffered up to this size and written together.
_STREAM_BYTES = 100_000_000


def write(
  directory: epath.PathLike,
  arrays: Iterable[tuple[str, np.ndarray]],
  *,
  layout: Layout,
  dtype: Any = None,
  step: int = 0,
):
  """Writes a checkpoint without training state from arrays that need not be in memory at once.

  Args:
    directory: The folder of checkpoints; must not exist.
    arrays: (name, value), such as ("params.embedding.table", ...).
    layout: The layout of the layers in `arrays`.
    dtype: The stored dtype; None: that of each array.
    step: The checkpoint's step.

  Raises:
    OSError: The write failed.
    UserError: A value is beyond the range of `dtype`.
  """
  import orbax.checkpoint as ocp
  from orbax.checkpoint import v1
  from orbax.checkpoint.experimental.v1 import partial

  path = epath.Path(directory) / f"checkpoint_{step:08d}"
  shapes: dict[str, Any] = {}
  waiting: dict[str, np.ndarray] = {}
  context = v1.Context()
  if dtype is not None:
    context.array.saving.storage_options.dtype = np.dtype(dtype)  # Cast while it is written.
  context.array.saving.storage_options.chunk_byte_size = 16_000_000
  context.memory.deepcopy_host_arrays = False
  with context:
    for name, value in arrays:
      stored = value.dtype if dtype is None else np.dtype(dtype)
      safetensors_files.check_range(name.removeprefix("params."), value, stored)
      shapes[name] = jax.ShapeDtypeStruct(value.shape, stored)
      waiting[name] = value
      if sum(array.nbytes for array in waiting.values()) >= _STREAM_BYTES:
        with _os_errors():
          partial.save(path, waiting)
        waiting = {}
      del value
    with _os_errors():
      if waiting:
        partial.save(path, waiting)
      partial.finalize(path)
  with contextlib.closing(ocp.JsonCheckpointHandler()) as handler:
    for item, value in (("metadata", metadata_of(shapes, layout)), ("train_input", {})):
      (path / item).mkdir()
      handler.save(path / item, args=ocp.args.JsonSave(value))
  with _os_errors():
    manifest.write(path)


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
  """Context that converts errors of Orbax and TensorStore to OSErrors."""
  try:
    yield
  except (ValueError, RuntimeError) as error:
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code is None:
      raise OSError(str(error)) from error
    raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
