# SPDX-License-Identifier: Apache-2.0
"""The knobs of an experiment by group, as `--fdl_help` and `--mode=show` print them."""

import contextlib
import textwrap
from collections.abc import Iterable
from typing import Any

from paxlike import registry
from paxlike.config import knob_types, type_words
from paxlike.config.knobs import UNSET, Knob, spell
from paxlike.experiment import Experiment
from paxlike.telemetry import formatting

_WIDTH = 100
_HEADER = ("  knob", "value", "default", "set by", "type")


def help_text(cls: type[Experiment]) -> str:
  """Returns the knobs of an experiment by group: name, default, description and type."""
  lines = [f"{cls.__name__}: {(cls.__doc__ or '').strip()}"]
  for heading, knobs in _groups(cls.knobs().values()):
    lines += ["", heading]
    for knob in knobs:
      default = "required" if knob.default is UNSET else spell(knob.default)
      kind = type_words.choices_or_name(knob.type)
      where = "" if knob.set_in is knob.declared_in else f"; set in {knob.set_in.__name__}"
      lines += [f"  --fdl.{knob.name}={default}", *_filled(knob.doc), *_filled(f"{kind}{where}")]
  return "\n".join(lines)


def table(experiment: Experiment, *, changed: bool = False) -> str:
  """Returns a table of an experiment's knobs by group.

  The default of a knob is that of the family: of the nearest base class that sets the knob and is
  not registered, or else of the class that declares it.

  Args:
    experiment: With its knobs set.
    changed: Only knobs whose value differs from the default; if there is none, "" is returned.
  """
  values, defaults = experiment.values(), _defaults(type(experiment))
  knobs = type(experiment).knobs().values()
  if changed:
    knobs = [knob for knob in knobs if values[knob.name].value != defaults[knob.name]]
  rows: list[tuple[str, ...] | str] = []
  for heading, group in _groups(knobs):
    rows.append(f"\n{heading}")
    for knob in group:
      value, source = values[knob.name]
      kind = type_words.choices_or_name(knob.type)
      rows.append((f"  {knob.name}", _spelt(value), _spelt(defaults[knob.name]), source, kind))
  return formatting.table(_HEADER, rows) if rows else ""


def _groups(knobs: Iterable[Knob]) -> Iterable[tuple[str, list[Knob]]]:
  """Yields (heading, knobs) of each group.

  The docstring of a group of `knob_groups` is its heading; other classes are named.
  """
  groups: dict[type, list[Knob]] = {}
  for knob in knobs:
    groups.setdefault(knob.group, []).append(knob)
  for group, members in groups.items():
    summary = (group.__doc__ or "").strip().split("\n")[0]
    is_titled = summary and group.__name__.endswith("Knobs")
    yield summary if is_titled else f"{group.__name__}: {summary}".rstrip(": "), members


def _defaults(cls: type[Experiment]) -> dict[str, Any]:
  """Returns the default of each knob in the family of an experiment."""
  above = {cls, *registry.registered().values()}
  family = [base for base in cls.__mro__ if base not in above]
  defaults = {}
  for name, knob in cls.knobs().items():
    owner = next((base for base in family if name in vars(base)), knob.declared_in)
    defaults[name] = value = vars(owner).get(name, UNSET)
    with contextlib.suppress(knob_types.RefusedError):  # The experiment declares another type.
      if value is not UNSET:
        defaults[name] = knob_types.convert(knob.type, value, text=False)
  return defaults


def _spelt(value: Any) -> str:
  return "(unset)" if value is UNSET else spell(value)


def _filled(text: str) -> list[str]:
  """Returns the lines of an indented paragraph."""
  indent = " " * 6
  return textwrap.wrap(
    text,
    _WIDTH,
    initial_indent=indent,
    subsequent_indent=indent,
    break_long_words=False,
    break_on_hyphens=False,
  )
