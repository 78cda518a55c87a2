# SPDX-License-Identifier: Apache-2.0
"""Parses the command line.

`--fdl.PATH=VALUE` sets a knob of the experiment if PATH is UPPER_CASE, and a value in its graph if
it is lower_case. Imports are light, so that `--help` and errors print at once.
"""

import re
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from paxlike.cli import flag_types
from paxlike.cli.flags import Options, check
from paxlike.cli.usage import CHECKED
from paxlike.errors import UserError

_ASSIGNMENT = re.compile(r"((?:[^=\[]|\[[^\]]*\])+)=(.*)", re.DOTALL)
_FDL = re.compile(r"--?fdl\.(.*)", re.DOTALL)
# Flags that absl itself defines: more flags from a file, and unknown flags to ignore.
_OF_ABSL = re.compile(r"--?(flagfile|undefok)(=.*)?", re.DOTALL)
# In every command of Pax's pages.
_OF_PAX = re.compile(r"--?alsologtostderr(=\w+)?")
_KNOB = re.compile(r"[A-Z][A-Z0-9_]*")


def parse(argv: Sequence[str]) -> Options:
  """Returns the options that a command line gives.

  Args:
    argv: The program's name and its arguments, as in `sys.argv`.

  Raises:
    UserError: A flag is unknown, has a bad value, contradicts another, or is missing.
  """
  values = flag_types.define()
  try:
    rest = values([argv[0] if argv else "paxlike", *_rewrite(argv[1:])])[1:]
  except absl_flags.UnrecognizedFlagError as error:
    from paxlike.cli import hints  # Here: it imports all experiments.

    known = [name for name in values if name not in ("h", "fdl_set")]
    hint = hints.of_flag(error.flagname, argv, known)
    raise UserError(f"unknown flag --{error.flagname}.{hint}") from None
  except (absl_flags.Error, ValueError) as error:  # --noFLAG=VALUE is a ValueError.
    raise UserError(str(error).removeprefix("flag ").replace("\n", " ")) from None
  if rest:
    hint = "" if rest[0].lower() not in ("true", "false") else " Give a bool as --flag=true."
    raise UserError(f"unexpected argument {rest[0]!r}: flags start with '--'.{hint}")
  given: dict[str, Any] = values.flag_values_dict()
  knobs, edits = _split_by_case(given["fdl_set"])
  if given["exp"] and given["fdl_config"] not in (None, given["exp"]):
    raise UserError(
      f"--exp={given['exp']} and --fdl_config={given['fdl_config']} name different experiments."
    )
  default = CHECKED if given["mode"] == "check" and not given["fdl_config_file"] else None
  options = Options(
    **{name: given[name] for name in flag_types.SCALARS if name != "fdl_config"},
    fdl_config=given["fdl_config"] or given["exp"] or default,
    knobs=knobs,
    edits=edits,
    fiddlers=tuple(given["fiddler"]),
    prompt=tuple(given["prompt"]),
    prompt_file=tuple(given["prompt_file"]),
    stop=tuple(given["stop"]),
    stop_token=tuple(given["stop_token"]),
    help=given["help"] or given["h"],
    fdl_allow_modules=tuple(filter(None, ",".join(given["fdl_allow_modules"]).split(","))),
  )
  if not options.help:
    check(options)
  return options


def _rewrite(args: Sequence[str]) -> list[str]:
  """Turns `--fdl.PATH=VALUE` and `--fdl.PATH VALUE` into `--fdl_set=PATH=VALUE`, as Pax does."""
  rewritten = []
  remaining = iter(args)
  for arg in remaining:
    if _OF_PAX.fullmatch(arg):
      print(f"paxlike: {arg} is not needed: logs are always printed", file=sys.stderr)
    elif arg == "--":
      rewritten += [arg, *remaining]
    elif match := _OF_ABSL.fullmatch(arg):
      raise UserError(f"unknown flag --{match[1]}. --help lists the flags.")
    elif match := _FDL.fullmatch(arg):
      assignment = match[1]
      _check_name(assignment, "--fdl.")
      if not _ASSIGNMENT.fullmatch(assignment):
        value = next(remaining, None)
        if value is None or value.startswith("--"):
          raise UserError(f"--fdl.{assignment} needs a value: --fdl.{assignment}=VALUE.")
        assignment = f"{assignment}={value}"
      rewritten.append(f"--fdl_set={assignment}")
    else:
      rewritten.append(arg)
  return rewritten


def _check_name(assignment: str, prefix: str):
  """Raises a UserError if there is no name before the "="."""
  if assignment.partition("=")[0].strip() in ("", "."):
    shown = assignment if len(assignment) <= 100 else f"{assignment[:100]}..."
    raise UserError(
      f"{prefix}{shown}: the name of a knob or a path is missing: {prefix}NAME=VALUE."
    )


def _split_by_case(
  assignments: Sequence[str],
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
  """Splits assignments into (KNOB, text) and (path, text) pairs."""
  knobs, edits = [], []
  for assignment in assignments:
    _check_name(assignment, "--fdl_set=")
    match = _ASSIGNMENT.fullmatch(assignment)
    if not match:
      raise UserError(f"--fdl_set={assignment}: expected PATH=VALUE.")
    path, text = match[1].strip(), match[2]
    first = re.split(r"[.\[]", path, maxsplit=1)[0]
    if _KNOB.fullmatch(path):
      knobs.append((path, text))
    elif _KNOB.fullmatch(first):
      raise UserError(f"--fdl.{path}: a knob cannot be set in part: give --fdl.{first}=VALUE.")
    elif first != first.lower():
      raise UserError(f"--fdl.{path}: knobs are UPPER_CASE, paths in the graph lower_case.")
    else:
      edits.append((path, text))
  return tuple(knobs), tuple(edits)
