# SPDX-License-Identifier: Apache-2.0
"""Passes a state over the chunks of packed sequences, on one device and over the axis `context`.

A chunk turns the state S before it into A S + U, with its transition A and its update U. One device
passes the state from chunk to chunk. If devices share a sequence, the (A, U) of several chunks come
from an associative scan, and a device gets the state at its start from those of all devices before
it. J is the number of chunks of a device; the other letters are those of a chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.layers.recurrent import shards

_Product = Callable[[jax.Array, jax.Array], jax.Array]


class Masks(NamedTuple):
  """Which tokens of a chunk are of the same document; the dims are chunks, sequences, tokens.

  Attributes:
    within_JBTS: Whether two tokens are.
    from_state_JBT: Whether a token is of the document of the last token before the chunk, and thus
      reads the state before the chunk.
    to_state_JBT: Whether a token is of the document of the chunk's last token, and thus adds to the
      state after the chunk.
    kept_JB: Whether the last token is of the document of the last token before the chunk, so that
      the state before the chunk is part of the state after it.
  """

  within_JBTS: jax.Array
  from_state_JBT: jax.Array
  to_state_JBT: jax.Array
  kept_JB: jax.Array


def masks(segments_BT: jax.Array, chunk: int, num_devices: int) -> Masks:
  """Returns the masks of a device's tokens; see `split` and `shards.on_shards`."""
  runs_BT = shards.runs(segments_BT, num_devices)
  runs_BT = jnp.pad(runs_BT, [(0, 0), (0, -runs_BT.shape[1] % chunk)], mode="edge")
  runs_JBT = split(runs_BT, chunk)
  last_JB = runs_JBT[:, :, -1]
  before_JB = jnp.concatenate([jnp.zeros_like(last_JB[:1]), last_JB[:-1]])
  return Masks(
    within_JBTS=runs_JBT[:, :, :, None] == runs_JBT[:, :, None],
    from_state_JBT=runs_JBT == before_JB[:, :, None],
    to_state_JBT=runs_JBT == last_JB[:, :, None],
    kept_JB=last_JB == before_JB,
  )


def split(x: jax.Array, chunk: int) -> jax.Array:
  """Returns x [B, T, ...] as chunks [J, B, T, ...]; zeros fill the last chunk."""
  rest = -x.shape[1] % chunk
  x = jnp.pad(x, [(0, 0), (0, rest)] + [(0, 0)] * (x.ndim - 2)) if rest else x
  return jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)


def join(x: jax.Array, num_tokens: int) -> jax.Array:
  """Returns chunks [J, B, T, ...] as [B, T, ...], without what `split` added."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(len(x), -1, *x.shape[3:])[:, :num_tokens]


def size(chunk: int, num_tokens: int) -> int:
  """Returns the tokens of a chunk: `chunk`, or a smaller power of two that holds all tokens."""
  return min(chunk, 1 << max(num_tokens - 1, 0).bit_length())


def states(
  transition: jax.Array, update: jax.Array, first: jax.Array, *, num_devices: int
) -> tuple[jax.Array, jax.Array]:
  """Returns (float32 [J, ..., P, Q], the states before each chunk; the state after the last).

  Args:
    transition: A, [J, ..., P, P], or [J, ...] if it is a multiple of the identity.
    update: U, [J, ..., P, Q].
    first: [..., P, Q], the state at the start of the sequence, the same on all devices.
    num_devices: The number of devices that share the sequence. The state after the last chunk is
      that of this device; see `shards.of_last`.
  """
  times: _Product = jnp.matmul
  if transition.ndim < update.ndim:
    times, transition = jnp.multiply, transition[..., None, None]

  def composed(earlier: tuple[Any, Any], later: tuple[Any, Any]) -> tuple[Any, Any]:
    (a, u), (b, v) = earlier, later
    return times(b, a), times(b, u) + v

  def passed(state: jax.Array, pair: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    return times(pair[0], state) + pair[1], state

  pairs = transition.astype(jnp.float32), update.astype(jnp.float32)
  first = first.astype(jnp.float32)
  if num_devices == 1:  # With fewer matmuls and less memory than an associative scan.
    last, before = jax.lax.scan(passed, first, pairs)
    return before, last
  transitions, updates = jax.lax.associative_scan(composed, pairs)
  first = _at_start(times, (transitions[-1], updates[-1]), first, num_devices)
  after = times(transitions, first) + updates
  return jnp.concatenate([first[None], after[:-1]]), after[-1]


def _at_start(
  times: _Product, of_device: tuple[jax.Array, jax.Array], first: jax.Array, num_devices: int
) -> jax.Array:
  """Returns the state at the start of this device, given the (A, U) of all its chunks."""
  transitions, updates = jax.lax.all_gather(of_device, shards.AXIS)
  states = [first]
  for device in range(num_devices - 1):
    states.append(times(transitions[device], states[-1]) + updates[device])
  return jnp.stack(states)[jax.lax.axis_index(shards.AXIS)]
