# SPDX-License-Identifier: Apache-2.0
"""Fetches files over HTTP: what has come stays, and is checked."""

import http.client
import pathlib
import urllib.error
import urllib.request
from collections.abc import Callable

from paxlike.data import files
from paxlike.errors import UserError

_CHUNK = 1 << 20


def fetch(
  url: str,
  to: pathlib.Path,
  *,
  sha256: str | None = None,
  progress: Callable[[int], object] = lambda num_bytes: None,
):
  """Fetches `url` as the file `to`, going on where an earlier try ended.

  Args:
    url: Where it is.
    to: The file. If it is there, nothing is fetched.
    sha256: What its content must have. None: anything.
    progress: Told of the bytes as they come.

  Raises:
    UserError: It cannot be fetched, or is another file.
    OSError: It cannot be written.
  """
  if not to.exists():
    part = to.with_name(f"{to.name}.part")
    try:
      _append(url, part, progress)
    except urllib.error.HTTPError as error:
      raise UserError(f"{url} cannot be fetched: {error.code} {error.reason}.") from None
    except urllib.error.URLError as error:
      raise UserError(f"{url} cannot be fetched: {error.reason}.") from None
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
      reason = str(error) or type(error).__name__
      raise UserError(f"{url} broke off: {reason}. The same command goes on.") from None
    if sha256 is not None and files.sha256(part) != sha256:
      part.unlink()
      raise UserError(f"{url} is not the file that was published: its SHA-256 is not {sha256}.")
    part.rename(to)


def _append(url: str, part: pathlib.Path, progress: Callable[[int], object]):
  have = part.stat().st_size if part.exists() else 0
  headers = {"User-Agent": "paxlike"} | ({"Range": f"bytes={have}-"} if have else {})
  try:
    response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
  except urllib.error.HTTPError as error:
    if error.code == 416 and have:  # All of it had come.
      return
    raise
  with response:
    resumed = response.status == 206
    if resumed:
      progress(have)
    expected = response.headers.get("Content-Length")
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab" if resumed else "wb") as file:
      got = 0
      while chunk := response.read(_CHUNK):
        file.write(chunk)
        got += len(chunk)
        progress(len(chunk))
    if expected is not None and expected.isdecimal() and got < int(expected):
      raise ConnectionError(f"{got} of {expected} bytes came")
