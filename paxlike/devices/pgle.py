# SPDX-License-Identifier: Apache-2.0
"""Profiles for XLA's profile-guided latency estimation (PGLE).

XLA's scheduler for GPUs places the starts and dones of asynchronous collectives by estimated
durations. A profile replaces the estimates by measured ones. It is a text protocol buffer,
`ProfiledInstructionsProto` of XLA, with an entry `costs { name: "all-gather-start.1" cost_us: 70 }`
for each instruction. JAX collects such profiles itself (JAX_ENABLE_PGLE), but not for programs that
are compiled ahead of time, as steps are here.
"""

import functools
import hashlib
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from paxlike import file_io
from paxlike.errors import UserError

SUFFIX = ".pbtxt"  # XLA tells text from binary profiles by it.
_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
_NAME, _COST = r'name\s*:\s*"([^"\\]*)"', r"cost_us\s*:\s*([\w.+-]+)"
_ENTRY = re.compile(rf"costs\s*:?\s*\{{\s*(?:{_NAME}\s*{_COST}|{_COST}\s*{_NAME})\s*\}}")
# Of the instructions in a profile, the share that a program must have. Profile and program differ a
# little, because scheduling adds and removes copies.
_LEAST_SHARED = 0.8


class Profile(NamedTuple):
  """A profile from a file.

  Attributes:
    source: The flag and the file, for messages.
    costs: Name of an instruction -> its duration in microseconds.
  """

  source: str
  costs: Mapping[str, float]

  def options(self) -> dict[str, Any]:
    """Returns the compiler option that makes XLA read a copy of the profile.

    The name of the copy contains the digest of its content, because the path is part of the key in
    JAX's compilation cache, and the content of the file is not.

    Raises:
      UserError: The copy cannot be written.
    """
    content = text(self.costs).encode()
    name = f"{hashlib.sha256(content).hexdigest()[:32]}{SUFFIX}"
    path = _copy(_folder_in_cache(), name, content)
    path = path or _copy(pathlib.Path(_temporary().name), name, content)
    if path is None:
      raise UserError(f"{self.source}: neither JAX's cache nor TMPDIR can hold a copy of it.")
    return {_OPTION: os.fspath(path)}

  def check(self, instructions: Collection[str]):
    """Raises a UserError if the profile is of another program than one with `instructions`."""
    shared = len(self.costs.keys() & set(instructions))
    if shared < _LEAST_SHARED * len(self.costs):
      raise UserError(
        f"{self.source} is of another program: of its {len(self.costs):,} instructions, the step"
        f" has {shared:,}. Make one by --mode=profile --save=FILE with the flags of this run."
      )


def read(path: str) -> Profile:
  """Returns the profile in the file of --pgle_profile.

  Raises:
    UserError: The file cannot be read, or is not a profile in text form.
  """
  try:
    content = file_io.read_bytes(path)
  except file_io.failures() as error:
    raise UserError(f"--pgle_profile={path}: {file_io.reason(error)}.") from None
  return parse(content.decode(errors="replace"), source=f"--pgle_profile={path}")


def parse(content: str, *, source: str) -> Profile:
  """Returns the profile in a text; `source` is for messages.

  Raises:
    UserError: It is not a profile.
  """
  costs: dict[str, float] = {}
  for match in _ENTRY.finditer(content):
    name, cost = (match[1], match[2]) if match[1] is not None else (match[4], match[3])
    costs[name.rpartition("::")[2]] = _number(cost)  # The program's fingerprint may precede it.
  rest = _ENTRY.sub("", re.sub(r"#.*", "", content))
  if rest.strip() or not costs or not all(0 <= cost < math.inf for cost in costs.values()):
    raise UserError(
      f"{source} is not a profile of instructions, as --mode=profile --save=FILE{SUFFIX} writes it."
    )
  return Profile(source, costs)


def text(costs: Mapping[str, float]) -> str:
  """Returns a profile in text form, given instruction -> microseconds."""
  lines = (f'costs {{ name: "{name}" cost_us: {cost:.6g} }}\n' for name, cost in costs.items())
  return "".join(lines)


def _number(literal: str) -> float:
  try:
    return float(literal)
  except ValueError:
    return math.nan


def _copy(folder: pathlib.Path | None, name: str, content: bytes) -> pathlib.Path | None:
  """Returns the file of this name and content in a folder; None: there can be none."""
  if folder is None:
    return None
  path = folder / name
  try:
    if not path.exists() or path.read_bytes() != content:
      folder.mkdir(parents=True, exist_ok=True)
      file_io.write(file_io.absolute(path), content)
  except OSError:  # The cache may be read-only, or another user's.
    return None
  return path


def _folder_in_cache() -> pathlib.Path | None:
  """Returns the folder in JAX's compilation cache; None without a local cache."""
  import jax

  config: Any = jax.config
  cache = config.jax_compilation_cache_dir
  return pathlib.Path(cache) / "pgle" if cache and not file_io.is_remote(cache) else None


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
  """Returns a folder of this process, which is removed at its end."""
  return tempfile.TemporaryDirectory(prefix="paxlike-pgle-")
