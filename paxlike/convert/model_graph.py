# SPDX-License-Identifier: Apache-2.0
"""Compares two graphs of a model by what affects the logits."""

from typing import Any

from paxlike.config import graph_data, graph_text
from paxlike.config.graph_data import Part

# Arguments of paxlike's layers that do not change the function that weights compute.
_WITHOUT_EFFECT = frozenset(
  {
    # The precision and order of computation, and where it runs.
    *("dot", "dtype", "kernel", "loss_chunks", "pipeline", "remat", "scan", "scheme", "time"),
    # Training only; initial weights are replaced by those of the checkpoint.
    *("balance_loss", "balanced_choices", "dropout", "init", "loss_weight", "z_loss"),
    *("label_smoothing", "qk_clip", "value_head"),
  }
)
# Arguments of which only the presence matters: it adds a weight to the layer.
_GIVEN_OR_NOT = frozenset({"bias_rate", "sinks"})


def difference(a: Any, b: Any) -> str | None:
  """Returns the first difference between two models that affects logits; None if there is none.

  Args:
    a: The reference: a graph of a model, or the same as data (`graph_data`).
    b: The model that is compared with it, likewise.

  Returns:
    A line such as "model.norm.epsilon = 0.5, not 1e-05".
  """
  lines = graph_text.difference(_Logits().of(graph_data.of(a)), _Logits().of(graph_data.of(b)))
  if not lines:
    return None
  line = " ".join(lines.splitlines()[0].split())
  return line.replace("graph", "model", 1).replace(" # was ", ", not ", 1)


class _Logits:
  """Copies a graph as data without what has no effect on logits."""

  def __init__(self):
    self._seen: dict[int, Any] = {}

  def of(self, value: Any) -> Any:
    """Returns the copy of a value; an object in two places of the graph stays one object."""
    if not isinstance(value, Part | dict | list | tuple):
      return value
    if id(value) not in self._seen:
      self._seen[id(value)] = self._made(value)
    return self._seen[id(value)]

  def _made(self, value: Any) -> Any:
    if isinstance(value, Part):
      return self._part(value)
    if isinstance(value, dict):
      return {key: self.of(item) for key, item in value.items()}
    return type(value)(self.of(item) for item in value)

  def _part(self, part: Part) -> Part:
    if not str(part.target).startswith("paxlike.layers:"):
      arguments = {name: self.of(item) for name, item in part.arguments.items()}
      return Part(part.kind, part.target, arguments, part.defaults)
    arguments = {}
    for name, item in part.arguments.items():
      if name in _GIVEN_OR_NOT:
        arguments[name] = item is not None
      elif name not in _WITHOUT_EFFECT:
        arguments[name] = self.of(item)
    if arguments.get("num_kv_heads") is None and "num_heads" in arguments:
      arguments["num_kv_heads"] = arguments["num_heads"]
    defaults = {name: part.defaults[name] for name in part.defaults if name not in _WITHOUT_EFFECT}
    defaults |= {name: defaults[name] is not None for name in _GIVEN_OR_NOT & defaults.keys()}
    return Part(part.kind, part.target, arguments, defaults)
