# SPDX-License-Identifier: Apache-2.0
"""Files of metrics: `metrics.jsonl`, a line for each record, and TensorBoard's."""

import contextlib
import json
import sys
import time
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


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
  """Context in which a package seems not to be installed, unless it is imported already."""
  hidden = name not in sys.modules
  modules: dict[str, Any] = sys.modules
  if hidden:
    modules[name] = None
  try:
    yield
  finally:
    if hidden:
      del modules[name]


class TensorBoardWriter:
  """Writes scalars under one folder of `summaries/`, which is made with the first of them."""

  def __init__(self, directory: epath.Path, *, first: int | None = None):
    """TensorBoard hides what earlier files hold of step `first` and later ones."""
    self._directory = directory
    self._first = first
    self._events: Any = None

  def write(self, step: int, scalars: Mapping[str, float]):
    """Adds `scalars` at `step`."""
    # Here: an evaluation or a test may never write.
    with _without("torch"):  # It imports that for seconds where it is installed, and needs it not.
      from tensorboardX import event_file_writer, summary
      from tensorboardX.proto import event_pb2

    proto: Any = event_pb2
    now = time.time()
    if self._events is None:
      self._directory.mkdir(parents=True, exist_ok=True)
      # Not SummaryWriter, whose thread fails on its own where the disk is full.
      self._events = event_file_writer.EventsWriter(
        str(self._directory / "events"), filename_suffix=f".{time.time_ns()}"
      )
      if self._first is not None:
        session = proto.SessionLog(status=proto.SessionLog.START)
        start = proto.Event(wall_time=now, step=self._first, session_log=session)
        self._events.write_event(start)
    for name, value in scalars.items():
      scalar = summary.scalar(name, value)
      self._events.write_event(proto.Event(wall_time=now, step=step, summary=scalar))
    self._events.flush()

  def close(self):
    """Closes the file."""
    if self._events is not None:
      self._events.close()
