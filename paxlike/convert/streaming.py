# SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint of paxlike an array at a time."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from paxlike.checkpoints import checksums
from paxlike.checkpoints.checkpoint import metadata_of
from paxlike.convert import tensors
from paxlike.layers.stack_layout import Layout

# Arrays of so many bytes are written together where a checkpoint is made of a stream of them.
_STREAM_BYTES = 100_000_000


def write(
  directory: epath.PathLike,
  arrays: Iterable[tuple[str, np.ndarray]],
  *,
  dtype: Any,
  layout: Layout,
):
  """Writes checkpoint 0 from arrays that need not be in memory at once.

  Args:
    directory: Of the checkpoints; must not be there.
    arrays: (name, value), such as ("params.embedding.table", ...).
    dtype: In which they are stored.
    layout: Where the names have each layer.

  Raises:
    OSError: It failed.
    UserError: A number is beyond the range of `dtype`.
  """
  import orbax.checkpoint as ocp
  from orbax.checkpoint import v1
  from orbax.checkpoint.experimental.v1 import partial

  path = epath.Path(directory) / "checkpoint_00000000"
  shapes: dict[str, Any] = {}
  waiting: dict[str, np.ndarray] = {}
  context = v1.Context()
  context.array.saving.storage_options.dtype = np.dtype(dtype)  # Converted on the way to the disk.
  context.array.saving.storage_options.chunk_byte_size = 16_000_000
  context.memory.deepcopy_host_arrays = False
  with context:
    for name, value in arrays:
      tensors.check_range(name.removeprefix("params."), value, np.dtype(dtype))
      shapes[name] = jax.ShapeDtypeStruct(value.shape, dtype)
      waiting[name] = value
      if sum(array.nbytes for array in waiting.values()) >= _STREAM_BYTES:
        with _failing():
          partial.save(path, waiting)
        waiting = {}
      del value
    with _failing():
      if waiting:
        partial.save(path, waiting)
      partial.finalize(path)
  with contextlib.closing(ocp.JsonCheckpointHandler()) as handler:
    for item, value in (("metadata", metadata_of(shapes, layout)), ("train_input", {})):
      (path / item).mkdir()
      handler.save(path / item, args=ocp.args.JsonSave(value))
  with _failing():
    checksums.write(path)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
  """Context of a write, whose errors become the OSErrors that they stand for."""
  try:
    yield
  except (ValueError, RuntimeError) as error:
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code is None:
      raise OSError(str(error)) from error
    raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
