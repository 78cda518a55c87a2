# SPDX-License-Identifier: Apache-2.0
"""The combinations of a sweep: from lists on the command line, from a file, or from both."""

import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paxlike import untrusted_files
from paxlike.config import knob_text
from paxlike.errors import UserError

#: Name of a knob, or path in the graph -> its value as on the command line.
Combination = dict[str, str]

PREFIX = "--sweep."
_MAX_NAME = 120  # Characters of a folder's name; file systems allow 255 bytes.
_LIST = r"^[\[(]([\w.+-]+(?:,[\w.+-]+)+)[\])]$"


def lists(flags: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
  """Returns the lists of `--sweep.NAME=[VALUE,...]` flags, and the other flags.

  Raises:
    UserError: A list is empty or no list, or a name has two.
  """
  found: dict[str, list[str]] = {}
  rest = []
  for flag in flags:
    if not flag.startswith(PREFIX):
      rest.append(flag)
      continue
    name, equals, text = flag.removeprefix(PREFIX).partition("=")
    if not name or not equals:
      raise UserError(f"{flag}: expected {PREFIX}NAME=[VALUE,VALUE,...].")
    if name in found:
      raise UserError(f"{PREFIX}{name} is given twice: join its lists.")
    found[name] = _values(flag, text.strip())
  return found, rest


def _values(flag: str, text: str) -> list[str]:
  if text[:1] != "[" or not knob_text.is_enclosed(text):
    raise UserError(f"{flag}: expected a list, such as [{text or 'VALUE'}].")
  try:
    values = knob_text.split(text[1:-1])
  except knob_text.MismatchError:
    raise UserError(f"{flag}: its brackets are not balanced.") from None
  if not values:
    raise UserError(f"{flag}: the list is empty.")
  if "" in values:
    raise UserError(f"{flag}: value {values.index('') + 1} is empty.")
  return values


def read(path: str) -> list[Combination]:
  """Returns the combinations in a JSON file: a list of mappings, such as `{"NUM_LAYERS": 2}`.

  Raises:
    UserError: It cannot be read, or is no such list.
  """
  given = f"--combinations={path}"
  file = pathlib.Path(path)
  content = untrusted_files.read(file, limit=untrusted_files.JSON_BYTES)
  found = untrusted_files.parse_json(content, place=given)
  if not isinstance(found, list) or not found:
    raise UserError(f"{given}: expected a JSON list of mappings, which is not empty.")
  for number, one in enumerate(found):
    if not isinstance(one, dict) or not one:
      raise UserError(
        f'{given}: item {number + 1} is {one!r:.100}: expected a mapping such as {{"KNOB": 2}}.'
      )
  return [{name: _spelled(value) for name, value in one.items()} for one in found]


def _spelled(value: Any) -> str:
  return value if isinstance(value, str) else knob_text.spell(value)


def joined(
  swept: Mapping[str, list[str]], listed: Sequence[Combination], *, in_step: bool
) -> list[Combination]:
  """Returns all combinations of the lists, each with all of those listed in a file.

  Args:
    swept: Name -> values.
    listed: Those of a file.
    in_step: Whether the lists go in step (first with first, ...) instead of as a grid.

  Raises:
    UserError: There is nothing to combine, lists in step differ in length, or a name is both in a
      list and in the file.
  """
  if not swept and not listed:
    raise UserError(f"what to sweep? Give {PREFIX}NAME=[VALUE,...] or --combinations=FILE.json.")
  if both := [name for name in swept if any(name in one for one in listed)]:
    raise UserError(f"{PREFIX}{both[0]} is in --combinations too: leave one out.")
  lengths = {name: len(values) for name, values in swept.items()}
  if in_step and len(set(lengths.values())) > 1:
    sizes = ", ".join(f"{name} has {size}" for name, size in lengths.items())
    raise UserError(f"--zip needs lists of the same length: {sizes} values.")
  groups = zip(*swept.values(), strict=True) if in_step else itertools.product(*swept.values())
  of_lists: list[Combination] = [dict(zip(swept, group, strict=True)) for group in groups]
  return [one | of_list for one in listed or [{}] for of_list in (of_lists or [{}])]


def named(found: Sequence[Combination]) -> dict[str, Combination]:
  """Returns name -> combination.

  Raises:
    UserError: Two are the same.
  """
  runs: dict[str, Combination] = {}
  for one in found:
    name = _name(one)
    if name in runs:
      raise UserError(f"{name} is given twice: leave one out.")
    runs[name] = one
  return runs


def _name(combination: Combination) -> str:
  """Returns the name of a combination's folder, which does not depend on the other combinations.

  It consists of the values, such as `LEARNING_RATE=1e-3,MESH=8,1,1`. If characters are replaced or
  cut off, a digest of the combination follows.
  """
  values = {name: re.sub(_LIST, r"\1", text) for name, text in combination.items()}
  whole = ",".join(f"{name}={text}" for name, text in values.items())
  plain = re.sub(r"[^\w.+,=-]+", "_", whole, flags=re.ASCII)
  if plain == whole and len(whole) <= _MAX_NAME:
    return whole
  digest = hashlib.sha256(json.dumps(combination).encode()).hexdigest()[:8]
  return f"{plain[:_MAX_NAME]},{digest}"


def flags(combination: Combination) -> list[str]:
  """Returns the flags of paxlike that set a combination."""
  return [f"--fdl.{name}={text}" for name, text in combination.items()]
