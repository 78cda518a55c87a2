# SPDX-License-Identifier: Apache-2.0
"""Finds the family that is nearest to a model of an unknown type, and how it differs."""

import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from paxlike import registry
from paxlike.checkpoints.hf_family import Family
from paxlike.config import building
from paxlike.convert import matching, size_checks
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.layers.module import Definition

Families = Mapping[str, tuple[type[Experiment], Family]]

_COMPARED = 5  # Families that are compared in full.
_SHOWN = 4  # Names of each kind of difference.
_OUTER = re.compile(r"(?:(?:decoder|language_model|model|text_model|transformer)\.)+")
_NUMBER = re.compile(r"(?<=\.)(?:\d+|\{\}|\{expert\})(?=\.)")


def describe(config: Mapping[str, Any], found: Mapping[str, TensorSpec], families: Families) -> str:
  """Returns a sentence: the nearest family and what differs from it, or that none is near.

  Args:
    config: The configuration of the unknown model.
    found: Its tensors.
    families: `model_type` -> experiment and family.
  """
  text = config.get("text_config")
  if isinstance(text, Mapping):
    config = {**{k: v for k, v in config.items() if k != "text_config"}, **text}
  theirs = _templates(found)
  if not any(theirs.keys() & _templates(_names(family)) for _, family in families.values()):
    return "No family has a tensor of these names."

  def rank(name: str) -> tuple[float, int, str]:
    _, family = families[name]
    # Of equally similar families, the one with the fewest knobs is first.
    return -_likeness(config, theirs, family), len(family.knobs), name

  ranked = sorted(families, key=rank)
  compared = {name: _compared(config, found, *families[name]) for name in ranked[:_COMPARED]}
  name, (keys, lacks, more) = min(
    compared.items(), key=lambda item: (item[1].more is None, sum(map(len, filter(None, item[1]))))
  )
  lines = [
    _listed("configuration keys that differ", keys),
    _listed(f"tensors that {name} lacks", lacks),
    _listed(f"tensors of {name} that this model lacks", more or []),
  ]
  return f"The nearest is {name}: {'; '.join(filter(None, lines)) or 'no name differs'}."


class _Difference(NamedTuple):
  """Names of keys, of tensors that the family lacks, and of those that it has in addition.

  Those in addition are None if the configuration does not determine which tensors are optional.
  """

  keys: list[str]
  lacks: list[str]
  more: list[str] | None


def _compared(
  config: Mapping[str, Any],
  found: Mapping[str, TensorSpec],
  experiment: type[Experiment],
  family: Family,
) -> _Difference:
  theirs, keys = _templates(found), _differing(config, family)
  model = _wanted(config, found, keys, experiment, family)
  ours = _templates(_names(family)) if model is None else model
  lacks = _other(theirs, ours | _templates(family.copies))
  return _Difference(keys, lacks, None if model is None else _other(model, theirs))


def _differing(config: Mapping[str, Any], family: Family) -> list[str]:
  try:
    return family.differing(config)
  except UserError:  # Two names of a key contradict each other.
    return list(config)


def _names(family: Family) -> list[str]:
  """Returns the names of tensors of a family, with `{}` for a layer."""
  rules = [family.rules, *family.without.values()]
  return [name for group in rules for rule in group.values() for name in rule.templates]


def _likeness(config: Mapping[str, Any], theirs: Mapping[str, str], family: Family) -> float:
  """Returns how many names a family shares, as the sum of the shares of tensors and keys."""
  ours = _templates(_names(family)).keys()
  shared = len(theirs.keys() & ours) / max(len(theirs.keys() | ours), 1)
  return shared - len(_differing(config, family)) / max(len(config), 1)


def _wanted(
  config: Mapping[str, Any],
  found: Mapping[str, TensorSpec],
  differing: Collection[str],
  experiment: type[Experiment],
  family: Family,
) -> dict[str, str] | None:
  """Returns the templates of the family's model of the same sizes; None if there is none."""
  try:
    with size_checks.describing(pathlib.Path("config.json")):
      knobs = family.read({key: value for key, value in config.items() if key not in differing})
      size_checks.check(knobs, family, found)
      made = registry.with_data(experiment, "Synthetic")(**knobs, USE_REPEATED_LAYER=False)
      definition = Definition(building.build(made.trainer().model))
      matches = matching.match(definition, family.rules_of, program=family.title)
  except UserError:
    return None
  return _templates(name for match in matches for name in match.theirs)


def _templates(names: Iterable[str]) -> dict[str, str]:
  """Returns the key by which names are compared -> the name, with `*` for layers and experts."""
  result = {}
  for name in names:
    template = _NUMBER.sub("*", name)
    result.setdefault(_OUTER.sub("", template, count=1), template)
  return result


def _other(these: Mapping[str, str], those: Mapping[str, str]) -> list[str]:
  return [name for key, name in these.items() if key not in those]


def _listed(what: str, names: list[str]) -> str:
  """Returns the number of names and the first few; "" if there are none."""
  more = ", ..." if len(names) > _SHOWN else ""
  return f"{what} ({len(names)}): {', '.join(names[:_SHOWN])}{more}" if names else ""
