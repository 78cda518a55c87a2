# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face, converted once and kept in the cache folder."""

import hashlib
import os
import pathlib
import sys

from paxlike import __version__
from paxlike.convert.importing import Source
from paxlike.data import token_index


def converted(path: pathlib.Path) -> pathlib.Path:
  """Returns a folder of the cache that holds the model of a folder of Hugging Face.

  It is converted when it is asked for first, and again when a file of it has changed. The weights
  keep their dtype, if it is one of bfloat16 and float16, and are else float32.

  Raises:
    UserError: The model is none that paxlike has, or the cache folder cannot be written.
  """
  to = token_index.cache_folder() / "converted" / f"{path.name}-{_fingerprint(path)}"
  if not to.is_dir():
    source = Source.hugging_face(path)
    print(f"paxlike: converts {path} into {to}", file=sys.stderr)
    source.convert(to, dtype=source.dtype)
  return to


def _fingerprint(path: pathlib.Path) -> str:
  """Returns digits that change with any file of a folder, with its place and with our version."""
  found = sorted((entry.name, entry.stat()) for entry in os.scandir(path) if entry.is_file())
  parts = [__version__, os.path.realpath(path)]
  parts += [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]
  return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
