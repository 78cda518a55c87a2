# SPDX-License-Identifier: Apache-2.0
"""Files of metrics: `metrics.jsonl`, a line for each record, and TensorBoard's."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath


def read(path: epath.Path) -> Iterator[dict[str, Any]]:
  """Yields the records of a `metrics.jsonl`; a last line cut short by a kill is not one."""
  for line in path.read_text().splitlines():
    try:
      yield json.loads(line)
    except json.JSONDecodeError:
      return


class JsonlWriter:
  """Appends records to a file, each at once."""

  def __init__(self, path: epath.Path, *, step: int):
    """Drops records of steps that the run, resumed after `step` updates, will do again."""
    kept = ""
    if path.exists():
      kept = "".join(f"{json.dumps(r)}\n" for r in read(path) if r["updates"] <= step)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(kept)
    temporary.replace(path)
    self._file = path.open("a")

  def write(self, record: Mapping[str, Any]):
    """Appends one record; numbers that are not finite become null."""
    clean = {
      key: None if isinstance(value, float) and value - value != 0 else value
      for key, value in record.items()
    }
    self._file.write(f"{json.dumps(clean)}\n")
    self._file.flush()

  def close(self):
    """Closes the file."""
    self._file.close()


class TensorBoardWriter:
  """Writes scalars under one folder of `summaries/`, which is made with the first of them."""

  def __init__(self, directory: epath.Path):
    self._directory = directory
    self._writer: Any = None

  def write(self, step: int, scalars: Mapping[str, float]):
    """Adds `scalars` at `step`."""
    if self._writer is None:
      import tensorboardX  # Here: an evaluation or a test may never write.

      self._writer = tensorboardX.SummaryWriter(str(self._directory))
    for name, value in scalars.items():
      self._writer.add_scalar(name, value, step)
    self._writer.flush()

  def close(self):
    """Ends the thread that writes."""
    if self._writer is not None:
      self._writer.close()
