# SPDX-License-Identifier: Apache-2.0
"""Matches paxlike's weights with the tensors that hold them, and reports mismatches."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from paxlike.checkpoints.hf_rules import Rule, Rules
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of

# A weight of a layer for multi-token prediction.
_FURTHER = re.compile(r"mtp\.layers\.(\d+)\.(block\.)?(.*)")


class Match(NamedTuple):
  """One layer of a weight and the tensors that hold it.

  Attributes:
    ours: The weight's name, as in a checkpoint of the unrolled layout.
    shape: The shape of one layer.
    rule: How the tensors are converted to the weight and back.
    theirs: The names of the tensors.
  """

  ours: str
  shape: tuple[int, ...]
  rule: Rule
  theirs: list[str]


def match(
  definition: Definition, rules_of: Callable[[Iterable[str]], Rules], *, program: str
) -> list[Match]:
  """Returns a match for every weight and layer of an unrolled model.

  Args:
    definition: The model.
    rules_of: Returns the rules for weights of these names, `{}` for the layer.
    program: Whose tensors they are, for errors.

  Raises:
    UserError: There is no rule for a weight.
  """
  layout = layout_of(definition.module)
  assert not layout.scanned
  places = {}
  for name, spec in definition.weights.items():
    if not spec.statistic:
      location = layout.locate(name)
      if location is not None:
        places[name] = location.template, location.layers[0]
      elif (further := _FURTHER.fullmatch(name)) is not None:
        layer, in_block, rest = further.groups()
        template = f"stack.{{}}.{rest}" if in_block else f"mtp.{{}}.{rest}"
        places[name] = template, layout.num_layers + int(layer)
      else:
        places[name] = name, 0
  rules = rules_of(template for template, _ in places.values())
  shapes: dict[int, dict[str, tuple[int, ...]]] = {}
  for name, (template, layer) in places.items():
    shapes.setdefault(layer, {})[template] = definition.weights[name].shape
  matches = []
  for name, (template, layer) in places.items():
    spec, rule = definition.weights[name], rules.get(template)
    if rule is None:
      raise UserError(f"{program} has no place for {name}.")
    rule = rule.among(shapes[layer])
    matches.append(Match(name, spec.shape, rule, rule.names(layer, spec.shape)))
  return matches


def table(matches: list[Match], arrow: str) -> str:
  """Returns a line for each weight: its name and shape, an arrow, and the tensors that hold it."""
  return "\n".join(f"{m.ours} {list(m.shape)} {arrow} {', '.join(m.theirs)}" for m in matches)


def check(matches: list[Match], found: Mapping[str, TensorSpec], is_ignored: Callable[[str], bool]):
  """Checks that the tensors are those of a model; some more are ignored.

  Raises:
    UserError: A tensor is missing, unexpected or of another shape; names the first five.
  """
  wanted = {
    name: shape
    for ours in matches
    for name, shape in zip(ours.theirs, ours.rule.their_shapes(ours.shape), strict=True)
  }
  lines = [f"missing: {name}" for name in wanted if name not in found]
  for name, spec in found.items():
    if name not in wanted and not is_ignored(name):
      lines.append(f"unexpected: {name}")
    elif name in wanted and spec.shape != wanted[name]:
      lines.append(f"wrong shape: {name} is {list(spec.shape)}, not {list(wanted[name])}")
  if lines:
    shown = "; ".join(lines[:5])
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise UserError(f"the tensors do not match the configuration: {shown}{more}.")
