# SPDX-License-Identifier: Apache-2.0
"""The inputs of a forward pass besides activations: segments, positions and the dropout key."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """Inputs that the model passes down to every layer.

  Attributes:
    segments_BT: int32; documents packed into one sequence are numbered from 1, padding is 0. None:
      each sequence is one document.
    positions_BT: int32, the position of each token in its document. None: 0 to T - 1.
    dropout: The key for this layer's dropout; None disables dropout.
    adapters_B: int32, the adapter that each sequence uses, of those of `LoraBank`; -1: none. None:
      no sequence uses one.
    shared: `KeysValues` of earlier layers, by their window; see `KvSource`.
    layer_inputs: [L, B, T, P], the part of each layer's input that does not depend on the layers
      before it; within a layer [B, T, P], its own. None: there is none.
    log_layers: Whether layers return metrics of their own; see `Aux`. Static.
    recomputes: Whether nothing in a layer but its input is kept for the backward pass. Static.
  """

  segments_BT: jax.Array | None = None
  positions_BT: jax.Array | None = None
  dropout: jax.Array | None = None
  adapters_B: jax.Array | None = None
  shared: dict[int, Any] = dataclasses.field(default_factory=dict)
  layer_inputs: jax.Array | None = None
  log_layers: bool = dataclasses.field(default=False, metadata={"static": True})
  recomputes: bool = dataclasses.field(default=False, metadata={"static": True})

  def fold(self, index: int | jax.Array) -> "Context":
    """Returns the context with `index` folded into the dropout key."""
    if self.dropout is None:
      return self
    return dataclasses.replace(self, dropout=jax.random.fold_in(self.dropout, index))
