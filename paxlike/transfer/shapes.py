# SPDX-License-Identifier: Apache-2.0
"""The models of `--mode=transfer`: an experiment at other widths and depths."""

import fractions
from collections.abc import Mapping
from typing import Any, NamedTuple

from paxlike.errors import UserError

#: The parametrizations, in the order in which they are shown.
KINDS = ("standard", "mup", "completep")
#: The knobs of a parametrization.
PARAMETRIZATION = ("PARAMETRIZATION", "BASE_MODEL_DIMS", "BASE_NUM_LAYERS", "BASE_DIMS_PER_HEAD")

# Knobs that grow with MODEL_DIMS: numbers of heads, which must stay whole, and widths.
_HEADS = (
  *("NUM_HEADS", "NUM_KV_HEADS", "NUM_GLOBAL_KV_HEADS", "MAMBA_NUM_HEADS"),
  *("LINEAR_NUM_KEY_HEADS", "LINEAR_NUM_VALUE_HEADS"),
)
_WIDTHS = ("HIDDEN_DIMS", "EXPERT_DIMS", "SHARED_EXPERT_DIMS", "LATENT_DIMS", "QUERY_LATENT_DIMS")


class Shape(NamedTuple):
  """A model.

  Attributes:
    width: MODEL_DIMS.
    depth: NUM_LAYERS.
  """

  width: int
  depth: int


class Training(NamedTuple):
  """What all models that are compared have in common.

  Attributes:
    experiment: The name of the experiment.
    steps: Optimizer steps.
    tokens_per_step: Tokens of a step.
  """

  experiment: str
  steps: int
  tokens_per_step: int


def grown(values: Mapping[str, Any], width: int) -> dict[str, int]:
  """Returns the knobs of a model that is `width` wide; heads are as wide as they were.

  Args:
    values: The knobs of the experiment; missing and None ones follow from others.
    width: The new MODEL_DIMS.

  Raises:
    UserError: A number of heads would not be whole.
  """
  by = fractions.Fraction(width, values["MODEL_DIMS"])
  knobs = {"MODEL_DIMS": width}
  for name in _HEADS:
    if (now := values.get(name)) is None:
      continue
    unit = (now / fractions.Fraction(values["MODEL_DIMS"])).denominator
    if width % unit:
      raise UserError(
        f"--widths={width}: {name}={now} of MODEL_DIMS={values['MODEL_DIMS']} stays a whole number"
        f" only at multiples of {unit}. Give those, or set {name}."
      )
    knobs[name] = int(now * by)
  for name in _WIDTHS:
    if (now := values.get(name)) is not None:
      knobs[name] = max(round(now * by), 1)
  return knobs


def based(kind: str, base: Shape, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the knobs of a parametrization whose base model is `base`, unless `values` name one."""
  if kind == "standard":
    return {"PARAMETRIZATION": kind}
  knobs = {"PARAMETRIZATION": kind, "BASE_MODEL_DIMS": values["BASE_MODEL_DIMS"] or base.width}
  if kind == "completep":
    knobs["BASE_NUM_LAYERS"] = values["BASE_NUM_LAYERS"] or base.depth
  if values["BASE_DIMS_PER_HEAD"] is not None:
    knobs["BASE_DIMS_PER_HEAD"] = values["BASE_DIMS_PER_HEAD"]
  return knobs
