# SPDX-License-Identifier: Apache-2.0
"""Metric files: `metrics.jsonl`, one line per record.

On an object store the lines are in `metrics/part-00000000.jsonl` and so on.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from paxlike import file_io
from paxlike.errors import UserError
from paxlike.telemetry.object_store_append import MAX_BYTES, GrowingFile

_PART = re.compile(r"part-[0-9]+\.jsonl")


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
