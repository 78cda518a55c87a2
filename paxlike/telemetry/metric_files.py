# SPDX-License-Identifier: Apache-2.0
"""Metric files: `metrics.jsonl`, one line per record, and TensorBoard event files.

On an object store the lines are in `metrics/part-00000000.jsonl` and so on.
"""

import contextlib
import importlib.util
import json
import os
import re
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from paxlike import file_io
from paxlike.errors import UserError
from paxlike.telemetry.object_store_append import MAX_BYTES, GrowingFile

_PART = re.compile(r"part-[0-9]+\.jsonl")
_PREFIX = "object:"  # Prefix of file names that tensorboardX passes to `_Objects`.


def files(folder: epath.Path) -> list[epath.Path]:
  """Returns the record files in a run's folder, oldest first.

  A run that was started on a disk and continued on an object store has both `metrics.jsonl` and
  parts with later records.
  """
  single = folder / "metrics.jsonl"
  parts = _parts(folder)
  return [single, *parts] if single.exists() else parts


def check(folder: epath.Path):
  """Raises a UserError if something else, such as a folder, has the name of a record file."""
  for path in [] if file_io.is_remote(folder) else files(folder):
    try:
      file_io.check_file(path)
    except OSError as error:
      raise UserError(
        f"{path}: {error.strerror}. The run keeps its metrics there: move it away."
      ) from None


def _parts(folder: epath.Path) -> list[epath.Path]:
  found = file_io.beginning_with(folder / "metrics", "part-")
  return [path for path in found if _PART.fullmatch(path.name)]


def records(folder: epath.Path) -> Iterator[dict[str, Any]]:
  """Yields the records of the run in `folder`.

  Skips records of parts that were already merged into `metrics.jsonl`.
  """
  merged: set[tuple[Any, ...]] = set()
  for path in files(folder):
    found = list(read(path))
    yield from (record for record in found if _key(record) not in merged)
    if path.name == "metrics.jsonl":
      merged.update(map(_key, found))


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
  return record.get("kind"), record.get("set"), record["updates"]


def read(path: epath.Path) -> Iterator[dict[str, Any]]:
  """Yields the records of one file, and prints which lines are damaged.

  A last line truncated by a kill is skipped silently.
  """
  lines = file_io.read_bytes(path, limit=None).splitlines(keepends=True)
  damaged = []
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      known = type(record["updates"]) is int
      if not known or not all(isinstance(record.get(key, ""), str) for key in ("kind", "set")):
        raise TypeError
    except file_io.MALFORMED:
      if number < len(lines) or line.endswith(b"\n"):
        damaged.append(number)
      continue
    yield record
  if damaged:
    first = f"line {damaged[0]}{f' and {len(damaged) - 1} more' if damaged[1:] else ''}"
    print(f"paxlike: {path} is damaged ({first}): skipped", file=sys.stderr)


def open_writer(folder: epath.Path, *, step: int) -> "JsonlWriter | PartsWriter":
  """Returns a writer of records for the run in `folder`, resumed after `step` updates."""
  if file_io.is_remote(folder):
    return PartsWriter(folder, step=step)
  return JsonlWriter(folder / "metrics.jsonl", step=step)


def clean(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a record for JSON: numbers that are not finite become None."""
  return {
    key: None if isinstance(value, float) and value - value != 0 else value
    for key, value in record.items()
  }


def layer_scalars(table: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
  """Returns the values of a `layers` record as "layers/METRIC/GROUP/LAYER" -> value."""
  return {
    f"layers/{metric}/{group}/{layer}": value
    for metric, groups in table.items()
    for group, values in groups.items()
    for layer, value in enumerate(values)
  }


def _line(record: Mapping[str, Any]) -> str:
  return f"{json.dumps(clean(record))}\n"


class JsonlWriter:
  """Appends records to a file, unbuffered."""

  def __init__(self, path: epath.Path, *, step: int):
    """Drops records beyond `step` updates, which the resumed run will repeat.

    Parts from an object store are merged into the file and removed.
    """
    kept = "".join(_line(r) for r in records(path.parent) if r["updates"] <= step)
    file_io.write(path, kept)
    for part in _parts(path.parent):
      part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
      os.rmdir(path.parent / "metrics")  # Only if empty: other files are not the run's.
    self._file = path.open("a")

  def write(self, record: Mapping[str, Any]):
    """Appends one record; numbers that are not finite become null."""
    self._file.write(_line(record))
    self._file.flush()

  def sync(self):
    """Does nothing: each record is written at once."""

  def close(self):
    """Closes the file."""
    self._file.close()


class PartsWriter:
  """Writes records to objects of at most about `MAX_BYTES`, the last of which grows."""

  def __init__(self, folder: epath.Path, *, step: int):
    """Drops records beyond `step` updates, which the resumed run will repeat."""
    self._folder = folder / "metrics"
    last, kept = -1, b""
    for path in files(folder):
      found = list(read(path))
      lines = [_line(record) for record in found if record["updates"] <= step]
      kept = "".join(lines).encode()
      if len(lines) < len(found):
        path.write_bytes(kept)
      if path.parent == self._folder:
        last = int(path.stem.removeprefix("part-"))
    if last < 0 or len(kept) >= MAX_BYTES:
      last, kept = last + 1, b""
    self._number = last
    self._file = GrowingFile(self._path(), kept)

  def _path(self) -> epath.Path:
    return self._folder / f"part-{self._number:08d}.jsonl"

  def write(self, record: Mapping[str, Any]):
    """Appends one record; it is uploaded at once or by a later `write` or `sync`."""
    if self._file.size >= MAX_BYTES:
      self._file.close()
      self._number += 1
      self._file = GrowingFile(self._path())
    self._file.write(_line(record).encode())
    self._file.flush()

  def sync(self):
    """Uploads all records."""
    self._file.sync()

  def close(self):
    """Uploads all records."""
    self._file.close()


class _Objects:
  """Opens event files on object stores; tensorboardX would upload the whole file for each event."""

  opened: GrowingFile

  def open(self, name: str) -> GrowingFile:
    self.opened = GrowingFile(epath.Path(name.removeprefix(_PREFIX)))
    return self.opened


class _GoogleStorage(types.ModuleType):
  """Stands for `google.cloud.storage`, which is imported when one of its attributes is read."""

  def __getattr__(self, name: str) -> Any:
    from google.cloud import storage

    return getattr(storage, name)


@contextlib.contextmanager
def _quick_import() -> Iterator[None]:
  """Context of an import of tensorboardX without the libraries that it would import if installed.

  torch is hidden. Google's storage client is deferred, for users of `gs://` in the same process.
  """
  modules: dict[str, Any] = sys.modules
  hidden = "torch" not in modules
  if hidden:
    modules["torch"] = None
  names: dict[str, Any] = {}
  with contextlib.suppress(ImportError):
    import google.cloud

    if importlib.util.find_spec("google.cloud.storage"):
      package: Any = google.cloud
      names = package.__dict__
      names.setdefault("storage", _GoogleStorage("google.cloud.storage"))
  try:
    yield
  finally:
    if hidden:
      modules.pop("torch", None)
    if isinstance(names.get("storage"), _GoogleStorage):
      del names["storage"]


class TensorBoardWriter:
  """Writes scalars to a folder of `summaries/`, created by the first write."""

  def __init__(self, directory: epath.Path, *, first: int | None = None):
    """Makes TensorBoard hide events of earlier files from step `first` on."""
    self._directory = directory
    self._first = first
    self._events: Any = None
    self._object: GrowingFile | None = None  # What `_events` writes to, on an object store.

  def write(self, step: int, scalars: Mapping[str, float]):
    """Adds `scalars` at `step`."""
    # Imported here, because some runs never write.
    with _quick_import():
      from tensorboardX import summary
      from tensorboardX.proto import event_pb2

    proto: Any = event_pb2
    now = time.time()
    if self._events is None:
      self._events = self._open()
      if self._first is not None:
        session = proto.SessionLog(status=proto.SessionLog.START)
        start = proto.Event(wall_time=now, step=self._first, session_log=session)
        self._events.write_event(start)
        self._first = None  # The next file must not hide anything.
    for name, value in scalars.items():
      scalar = summary.scalar(name, value)
      self._events.write_event(proto.Event(wall_time=now, step=step, summary=scalar))
    self._events.flush()
    if self._object is not None and self._object.size >= MAX_BYTES:
      self.close()
      self._events = None

  def _open(self) -> Any:
    """Creates a file and returns its writer."""
    with _quick_import():
      from tensorboardX import event_file_writer, record_writer

    prefix = str(self._directory / "events")
    remote = file_io.is_remote(self._directory)
    objects = _Objects()
    if remote:
      record_writer.register_writer_factory(_PREFIX.rstrip(":"), objects)
      prefix = _PREFIX + prefix
    else:
      self._directory.mkdir(parents=True, exist_ok=True)
    # Not SummaryWriter, whose thread would fail unnoticed on a full disk.
    events = event_file_writer.EventsWriter(prefix, filename_suffix=f".{time.time_ns()}")
    self._object = objects.opened if remote else None
    return events

  def sync(self):
    """Uploads all events, on an object store."""
    if self._object is not None:
      self._object.sync()

  def close(self):
    """Closes the file."""
    if self._events is not None:
      self._events.close()
