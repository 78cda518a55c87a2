# SPDX-License-Identifier: Apache-2.0
"""The archives of `tests/golden`."""

import pathlib
import tarfile
from typing import Any


def extract(archive: pathlib.Path, to: pathlib.Path):
  """Extracts an archive; Python 3.11 has the filter that 3.14 asks for only from 3.11.4 on."""
  options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
  with tarfile.open(archive) as files:
    files.extractall(to, **options)
