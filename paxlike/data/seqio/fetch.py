# SPDX-License-Identifier: Apache-2.0
"""Downloads files over HTTP, with resume and checksums."""

import http.client
import pathlib
import urllib.error
import urllib.request
from collections.abc import Callable

from paxlike.data.text import find_files
from paxlike.errors import UserError

_CHUNK = 1 << 20


def fetch(
  url: str,
  to: pathlib.Path,
  *,
  sha256: str | None = None,
  progress: Callable[[int], object] = lambda num_bytes: None,
):
  """Downloads `url` to the file `to`; resumes an interrupted download.

  Args:
    url: The source.
    to: The file. If it exists, nothing is downloaded.
    sha256: The expected checksum. None: not checked.
    progress: Called with the number of bytes just received.

  Raises:
    UserError: The download failed, or the checksum differs.
    OSError: The file cannot be written.
  """
  if not to.exists():
    part = to.with_name(f"{to.name}.part")
    try:
      _append(url, part, progress)
    except urllib.error.HTTPError as error:
      raise UserError(f"{url} cannot be downloaded: {error.code} {error.reason}.") from None
    except urllib.error.URLError as error:
      raise UserError(f"{url} cannot be downloaded: {error.reason}.") from None
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
      reason = str(error) or type(error).__name__
      raise UserError(
        f"the download of {url} was interrupted: {reason}. Run the same command to resume it."
      ) from None
    if sha256 is not None and find_files.sha256(part) != sha256:
      part.unlink()
      raise UserError(f"{url} is not the file that was published: its SHA-256 is not {sha256}.")
    part.rename(to)


def _append(url: str, part: pathlib.Path, progress: Callable[[int], object]):
  have = part.stat().st_size if part.exists() else 0
  headers = {"User-Agent": "paxlike"} | ({"Range": f"bytes={have}-"} if have else {})
  try:
    response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
  except urllib.error.HTTPError as error:
    if error.code == 416 and have:  # Range not satisfiable: the file was already complete.
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
      raise ConnectionError(f"received {got} of {expected} bytes")
