# SPDX-License-Identifier: Apache-2.0
"""The files of records that a knob names."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from paxlike.data.text import find_files, records
from paxlike.data.text.records import Placed
from paxlike.errors import UserError


class RecordFiles:
  """Files of records; for formats see `records`.

  Attributes:
    named: Their name in messages.
  """

  def __init__(self, path: str | None, *, knob: str):
    """Reads nothing yet; `path` is a file, a folder (searched with its sub-folders) or a glob."""
    self._path = path
    self._knob = knob
    self.named = f"{knob}={path}"

  def __len__(self) -> int:
    return len(self._names)

  def stamps(self) -> Any:
    """Returns JSON that changes with the files; see `find_files.stamps`.

    Raises:
      UserError: There are none.
    """
    return find_files.stamps(self._names, knob=self._knob)

  def read(self, fields: Iterable[str] = ()) -> Iterator[Placed]:
    """Yields all records; see `records.read`. Without `fields`, columns of all names are read.

    Raises:
      UserError: A file cannot be read.
    """
    for name in self._names:
      try:
        yield from records.read(name, fields)
      except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{self._knob}: {name} cannot be read: {error}.") from error

  @functools.cached_property
  def _names(self) -> list[str]:
    return find_files.find(self._path, records.SUFFIXES, knob=self._knob)
