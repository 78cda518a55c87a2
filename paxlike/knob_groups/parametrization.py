# SPDX-License-Identifier: Apache-2.0
"""The knobs that carry the hyperparameters of a small model over to a large one."""

from typing import Literal

import fiddle as fdl

from paxlike import fiddlers
from paxlike.config import ranges
from paxlike.config.knobs import Knobs
from paxlike.errors import UserError


class ParametrizationKnobs(Knobs):
  """Parametrization: hyperparameters tuned on a small base model serve this one."""

  #: mup: hyperparameters tuned at BASE_MODEL_DIMS serve MODEL_DIMS; completep: and those tuned at
  #: BASE_NUM_LAYERS serve NUM_LAYERS.
  PARAMETRIZATION: Literal["standard", "mup", "completep"] = "standard"
  BASE_MODEL_DIMS: ranges.Size | None = None  #: MODEL_DIMS of the base model.
  BASE_NUM_LAYERS: ranges.Depth | None = None  #: NUM_LAYERS of the base model.
  #: DIMS_PER_HEAD of the base model. None: that of this model, which has more heads instead.
  BASE_DIMS_PER_HEAD: ranges.Size | None = None

  def parametrize(self, graph: fdl.Buildable):
    """Changes the model and the optimizer in a graph, unless PARAMETRIZATION=standard.

    Raises:
      UserError: The base model is not given.
    """
    kind = self.PARAMETRIZATION
    if kind == "standard":
      return
    if self.BASE_MODEL_DIMS is None:
      raise UserError(f"PARAMETRIZATION={kind} needs BASE_MODEL_DIMS.")
    if kind == "completep" and self.BASE_NUM_LAYERS is None:
      raise UserError("PARAMETRIZATION=completep needs BASE_NUM_LAYERS.")
    fiddlers.parametrize(
      graph,
      base_dim=self.BASE_MODEL_DIMS,
      base_layers=self.BASE_NUM_LAYERS if kind == "completep" else None,
      base_head_dim=self.BASE_DIMS_PER_HEAD,
    )
