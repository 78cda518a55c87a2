# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files in `summaries/` of the run's folder, local or on an object store."""

import contextlib
import functools
import importlib.util
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from paxlike import file_io
from paxlike.telemetry.object_store_append import MAX_BYTES, GrowingFile
from paxlike.telemetry.trackers.tracker import Record, TrackedRun, Tracker

_PREFIX = "object:"  # Prefix of file names that tensorboardX passes to `_Objects`.


class TensorBoard(Tracker):
  """Writes event files, in a folder for each part: `summaries/train`, `summaries/eval_SET`."""

  in_folder = True

  def open(self, run: TrackedRun) -> Mapping[str, int]:
    _library()  # Now, while no other tracker has a thread.
    self._run = run
    self._writers: dict[str, TensorBoardWriter] = {}
    return {}

  def write(self, record: Record):
    if record.part not in self._writers:
      first = None
      if self._run.is_trained:
        # Steps from this one on will be repeated; some parts count them from 0.
        first = self._run.step + 1 - (record.updates - record.step)
      folder = self._run.folder / "summaries" / record.part
      self._writers[record.part] = TensorBoardWriter(folder, first=first)
    self._writers[record.part].write(record.step, {**record.scalars, **record.texts})

  def sync(self):
    for writer in self._writers.values():
      writer.sync()

  def close(self, status: str):
    for writer in self._writers.values():
      writer.close()


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


@functools.cache
def _library() -> types.SimpleNamespace:
  """Returns the modules of tensorboardX that are used here.

  Their import changes `sys.modules` for all threads.
  """
  with _quick_import():
    from tensorboardX import event_file_writer, record_writer, summary
    from tensorboardX.proto import event_pb2
  return types.SimpleNamespace(
    events=event_file_writer, objects=record_writer, summary=summary, proto=event_pb2
  )


class TensorBoardWriter:
  """Writes scalars and texts to a folder of `summaries/`, created by the first write."""

  def __init__(self, directory: epath.Path, *, first: int | None = None):
    """Makes TensorBoard hide events of earlier files from step `first` on."""
    self._directory = directory
    self._first = first
    self._events: Any = None
    self._object: GrowingFile | None = None  # What `_events` writes to, on an object store.

  def write(self, step: int, values: Mapping[str, float | str]):
    """Adds numbers and texts at `step`."""
    proto, summary = _library().proto, _library().summary
    now = time.time()
    if self._events is None:
      self._events = self._open()
      if self._first is not None:
        session = proto.SessionLog(status=proto.SessionLog.START)
        start = proto.Event(wall_time=now, step=self._first, session_log=session)
        self._events.write_event(start)
        self._first = None  # The next file must not hide anything.
    for name, value in values.items():
      kind = summary.text if isinstance(value, str) else summary.scalar
      self._events.write_event(proto.Event(wall_time=now, step=step, summary=kind(name, value)))
    self._events.flush()
    if self._object is not None and self._object.size >= MAX_BYTES:
      self.close()
      self._events = None

  def _open(self) -> Any:
    """Creates a file and returns its writer."""
    prefix = str(self._directory / "events")
    remote = file_io.is_remote(self._directory)
    objects = _Objects()
    if remote:
      _library().objects.register_writer_factory(_PREFIX.rstrip(":"), objects)
      prefix = _PREFIX + prefix
    else:
      self._directory.mkdir(parents=True, exist_ok=True)
    # Not SummaryWriter, whose thread would fail unnoticed on a full disk.
    events = _library().events.EventsWriter(prefix, filename_suffix=f".{time.time_ns()}")
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
