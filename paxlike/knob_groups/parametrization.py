# SPDX-License-Identifier: Apache-2.0
"""The knobs that carry the hyperparameters of a small model over to a large one."""

from typing import Literal

import fiddle as fdl

from paxlike import fiddlers
from paxlike.config import ranges
from paxlike.config.knobs import Knobs


class ParametrizationKnobs(Knobs):
  """Parametrization: hyperparameters tuned on a small base model serve this one."""

  #: mup: initial weights, learning rates and scales for any width of the model; completep: for any
  #: depth, too. Hyperparameters are those of a base model.
  PARAMETRIZATION: Literal["standard", "mup", "completep"] = "standard"
  BASE_MODEL_DIMS: ranges.Size | None = None  #: MODEL_DIMS of the base model. None: MODEL_DIMS.
  BASE_NUM_LAYERS: ranges.Depth | None = None  #: NUM_LAYERS of the base model. None: NUM_LAYERS.
  #: DIMS_PER_HEAD of the base model. None: that of this model, which has more heads instead.
  BASE_DIMS_PER_HEAD: ranges.Size | None = None

  def parametrize(self, graph: fdl.Buildable):
    """Changes the model and the optimizer in a graph, unless PARAMETRIZATION=standard."""
    kind = self.PARAMETRIZATION
    if kind == "standard":
      return
    fiddlers.parametrize(
      graph,
      base_dim=self.BASE_MODEL_DIMS,
      base_layers=self.BASE_NUM_LAYERS if kind == "completep" else None,
      base_head_dim=self.BASE_DIMS_PER_HEAD,
    )
