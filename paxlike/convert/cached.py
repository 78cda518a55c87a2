# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models, converted at the first use and kept in the cache folder."""

import hashlib
import os
import pathlib
import sys

from paxlike import __version__
from paxlike.convert.importing import Source
from paxlike.data import token_index


def converted(path: pathlib.Path) -> pathlib.Path:
  """Returns the cache folder of the converted model in a Hugging Face folder.

  Converts it at the first use, and again after one of its files has changed. Weights of bfloat16 or
  float16 keep their dtype; others become float32.

  Raises:
    UserError: paxlike does not have the model, or the cache folder cannot be written.
  """
  to = token_index.cache_folder() / "converted" / f"{path.name}-{_fingerprint(path)}"
  if not to.is_dir():
    source = Source.hugging_face(path)
    print(f"paxlike: converting {path} into {to}", file=sys.stderr)
    source.convert(to, dtype=source.dtype)
  return to


def _fingerprint(path: pathlib.Path) -> str:
  """Returns a hash of a folder's path and files (name, size, time) and of paxlike's version."""
  found = sorted((entry.name, entry.stat()) for entry in os.scandir(path) if entry.is_file())
  parts = [__version__, os.path.realpath(path)]
  parts += [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]
  return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
