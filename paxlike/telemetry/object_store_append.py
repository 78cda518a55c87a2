# SPDX-License-Identifier: Apache-2.0
"""Growing files on object stores, which can only write whole objects."""

import time

from etils import epath

# Each upload writes the whole object, so a longer file is continued in another object.
MAX_BYTES = 2**20
# Time between uploads. Stores limit writes of an object to one per second, and charge for each.
SECONDS = 10.0


class GrowingFile:
  """An object to append to; what was written since the last upload is only in memory.

  Attributes:
    size: Bytes written so far.
  """

  def __init__(self, path: epath.Path, data: bytes = b""):
    """Continues an object that holds `data`."""
    self._path = path
    self._data = bytearray(data)
    self._uploaded = self.size = len(data)
    self._time = -SECONDS

  def write(self, data: bytes):
    """Appends bytes."""
    self._data += data
    self.size += len(data)

  def flush(self):
    """Uploads new bytes, unless the last upload was within `SECONDS`."""
    if time.monotonic() >= self._time + SECONDS:
      self.sync()

  def sync(self):
    """Uploads new bytes."""
    if self._uploaded < self.size:
      self._path.write_bytes(bytes(self._data))
      self._uploaded = self.size
      self._time = time.monotonic()

  close = sync
