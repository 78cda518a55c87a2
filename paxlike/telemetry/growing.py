# SPDX-License-Identifier: Apache-2.0
"""Files that grow, on object stores, where a file cannot be appended to but only written whole."""

import time

from etils import epath

# A write uploads all that the object holds; a longer file goes on in another object.
MAX_BYTES = 2**20
# Stores refuse to replace an object more often than once a second, and each time costs money.
SECONDS = 10.0


class GrowingFile:
  """An object that holds all that was written to it, as of the last upload.

  Attributes:
    size: Bytes written so far.
  """

  def __init__(self, path: epath.Path, data: bytes = b""):
    """Goes on with an object that holds `data`."""
    self._path = path
    self._data = bytearray(data)
    self._uploaded = self.size = len(data)
    self._time = -SECONDS

  def write(self, data: bytes):
    """Appends bytes."""
    self._data += data
    self.size += len(data)

  def flush(self):
    """Uploads what is new, unless that was done in the last `SECONDS`."""
    if time.monotonic() >= self._time + SECONDS:
      self.sync()

  def sync(self):
    """Uploads what is new."""
    if self._uploaded < self.size:
      self._path.write_bytes(bytes(self._data))
      self._uploaded = self.size
      self._time = time.monotonic()

  close = sync
