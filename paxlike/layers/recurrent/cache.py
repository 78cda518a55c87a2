# SPDX-License-Identifier: Apache-2.0
"""The cache of layers with a recurrent state, for incremental decoding."""

import dataclasses

import jax
import jax.numpy as jnp

from paxlike.devices import mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentCache:
  """The cache of one layer; its size does not depend on the number of tokens.

  Attributes:
    inputs: Of each short convolution, the last inputs [B, taps - 1, ...]; zeros before the first.
    state: float32 [B, N, ...], the state after the last token.
  """

  inputs: tuple[jax.Array, ...]
  state: jax.Array

  @classmethod
  def empty(cls, inputs: tuple[jax.Array, ...], state: jax.Array) -> "RecurrentCache":
    """Returns a cache without tokens, given its arrays of zeros, sharded over batch and heads."""
    inputs = tuple(
      mesh.constrain(x, "batch", None, "heads", *(None,) * (x.ndim - 3)) for x in inputs
    )
    state = mesh.constrain(state, "batch", "heads", *(None,) * (state.ndim - 2))
    return cls(inputs=inputs, state=state)

  def grown(self, num_slots: int) -> "RecurrentCache":
    """Returns self: more tokens need no more slots."""
    del num_slots
    return self

  def updated(
    self, inputs: tuple[jax.Array, ...], state: jax.Array, positions_BT: jax.Array
  ) -> "RecurrentCache":
    """Returns the cache with these arrays in the sequences that have a token.

    Sequences whose positions are all -1, such as free decode slots, keep theirs.
    """
    is_used_B = (positions_BT >= 0).any(axis=1)

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
      is_used = is_used_B.reshape(-1, *(1,) * (old.ndim - 1))
      return jnp.where(is_used, new.astype(old.dtype), old)

    return RecurrentCache(
      inputs=jax.tree.map(chosen, inputs, self.inputs), state=chosen(state, self.state)
    )
