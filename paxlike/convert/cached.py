# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models, converted at the first use and kept in the cache folder."""

import hashlib
import os
import pathlib
import sys
import types
from collections.abc import Iterable, Sequence

from paxlike import __version__, registry
from paxlike.convert.importing import Source
from paxlike.data import token_index


def converted(path: pathlib.Path, *, allow_modules: Iterable[str] = ()) -> pathlib.Path:
  """Returns the cache folder of the converted model in a Hugging Face folder.

  Converts it at the first use, and again after one of its files has changed. Weights of bfloat16 or
  float16 keep their dtype; others become float32.

  Args:
    path: The folder.
    allow_modules: Modules to import first, which may register the model's family.

  Raises:
    UserError: paxlike does not have the model, or the cache folder cannot be written.
  """
  modules = registry.import_modules(allow_modules)
  to = token_index.cache_folder() / "converted" / f"{path.name}-{_fingerprint(path, modules)}"
  if not to.is_dir():
    source = Source.hugging_face(path)
    print(f"paxlike: converting {path} into {to}", file=sys.stderr)
    source.convert(to, dtype=source.dtype)
  return to


def _fingerprint(path: pathlib.Path, modules: Sequence[types.ModuleType]) -> str:
  """Returns a hash of paxlike's version, the folder, its files and the modules' source files.

  Of a file, its name, size and time of modification count, not its content.
  """
  found = sorted((entry.name, entry.stat()) for entry in os.scandir(path) if entry.is_file())
  parts = [__version__, os.path.realpath(path)]
  sources = [module.__file__ for module in modules if module.__file__]
  found += [(name, os.stat(name)) for name in sources]
  parts += [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]
  return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
