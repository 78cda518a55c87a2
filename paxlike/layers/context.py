# SPDX-License-Identifier: Apache-2.0
"""What layers may need to know about the tokens besides their activations."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """Passed down unchanged from the model's root to every layer.

  Attributes:
    segments_BT: int32; documents packed into one row are numbered from 1, padding is 0. None: each
      row is one document.
    positions_BT: int32, the position of each token in its document. None: counted from the row.
    dropout: The key for this layer's dropout; None switches dropout off.
  """

  segments_BT: jax.Array | None = None
  positions_BT: jax.Array | None = None
  dropout: jax.Array | None = None

  def fold(self, index: int | jax.Array) -> "Context":
    """Returns the context whose dropout key belongs to part `index` of the model."""
    if self.dropout is None:
      return self
    return dataclasses.replace(self, dropout=jax.random.fold_in(self.dropout, index))
