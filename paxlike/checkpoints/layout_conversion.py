# SPDX-License-Identifier: Apache-2.0
"""Comparison and conversion of a state between layouts (scanned, unrolled, pipelined)."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from paxlike.config import ranges
from paxlike.layers.stack_layout import Layout

Flat = dict[str, Any]

# Prefixes of what a checkpoint may lack: non-trainable state, such as an amax history, and the
# state of the optimizer's guard.
_OPTIONAL = ("extra.", "guard.")

MTP = "mtp."  # Prefix of the weights for multi-token prediction.
# Prefixes of the weights that only training uses: a model that is not trained may lack them.
OF_TRAINING = (MTP, "value_head.")

# Predicate: whether an array of a checkpoint, such as "params.norm.scale", may stay unread.
Unread = Callable[[str], bool]


def anything(name: str) -> bool:
  """An `Unread`: every array may stay unread."""
  del name
  return True


def all_but_weights(name: str) -> bool:
  """An `Unread`: everything but weights, for a target that is a whole model.

  A model that is not trained lacks those of training.
  """
  part, _, weight = name.partition(".")
  return part != "params" or weight.startswith(OF_TRAINING)


def _by_layer(flat: Mapping[str, Any], layout: Layout) -> dict[tuple[str, int], tuple[Any, Any]]:
  """Returns (template, layer) -> (shape, dtype), which does not depend on the layout."""
  result = {}
  for name, leaf in flat.items():
    location = layout.locate(name)
    if location is None:
      result[name, 0] = (tuple(leaf.shape), leaf.dtype)
    else:
      shape = tuple(leaf.shape)[1:] if location.stacked else tuple(leaf.shape)
      for layer in location.layers:
        result[location.template, layer] = (shape, leaf.dtype)
  return result


def differences(
  saved: Mapping[str, Any],
  saved_layout: Layout,
  target: Mapping[str, Any],
  layout: Layout,
  *,
  unread: Unread | None,
) -> list[str]:
  """Returns a line for each layer's weight that only one side has, or in another shape or dtype.

  Non-trainable state may differ. A weight that only the checkpoint has is allowed if `unread` is
  true for it. Float dtypes may differ unless `unread` is None.
  """
  have, want = _by_layer(saved, saved_layout), _by_layer(target, layout)
  lines = []
  for key in have.keys() | want.keys():
    name = key[0].format(f"layers.{key[1]}")
    if name.startswith(_OPTIONAL):
      continue
    if key not in want:
      if unread is None or not unread(name):
        lines.append(f"{name}: only in the checkpoint")
    elif key not in have:
      lines.append(f"{name}: not in the checkpoint")
    elif not _fits(have[key], want[key], any_float=unread is not None):
      (shape, dtype), (wanted_shape, wanted_dtype) = have[key], want[key]
      lines.append(
        f"{name}: {dtype}{list(shape)} in the checkpoint,"
        f" {wanted_dtype}{list(wanted_shape)} in this experiment"
      )
  return sorted(lines)


def lacking(
  saved: Mapping[str, Any], saved_layout: Layout, target: Mapping[str, Any], layout: Layout
) -> set[str]:
  """Returns the non-trainable state of `target` that `saved` lacks or has in other shapes."""
  have = _by_layer(saved, saved_layout)
  return {
    name
    for name, leaf in target.items()
    if name.startswith(_OPTIONAL)
    and any(have.get(key) != what for key, what in _by_layer({name: leaf}, layout).items())
  }


def _fits(saved: tuple[Any, Any], wanted: tuple[Any, Any], *, any_float: bool) -> bool:
  if any_float and all(jnp.issubdtype(dtype, jnp.floating) for _, dtype in (saved, wanted)):
    return saved[0] == wanted[0]
  return saved == wanted


def in_layout(
  target: Mapping[str, jax.ShapeDtypeStruct], layout: Layout, other: Layout
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the arrays of `target` in layout `other`, with the same shardings."""
  if layout == other:
    return dict(target)
  result = {}
  for name, leaf in target.items():
    location = layout.locate(name)
    if location is None:
      result[name] = leaf
      continue
    shape = leaf.shape[1:] if location.stacked else leaf.shape
    spec = _padded_spec(leaf)[1:] if location.stacked else _padded_spec(leaf)
    mesh = leaf.sharding.mesh
    for layer in location.layers:
      place, repeat = other.place(location.template, layer)
      if repeat is None:
        where = NamedSharding(mesh, PartitionSpec(*spec))
        result[place] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)
      else:
        where = NamedSharding(mesh, PartitionSpec(None, *spec))
        stacked = (other.stacked_size, *shape)
        result[place] = jax.ShapeDtypeStruct(stacked, leaf.dtype, sharding=where)
  return result


def _padded_spec(leaf: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
  spec = tuple(leaf.sharding.spec)
  return spec + (None,) * (len(leaf.shape) - len(spec))


def converted(
  state: Flat, source: Layout, target: Mapping[str, jax.ShapeDtypeStruct], layout: Layout
) -> Flat:
  """Returns the arrays of `state` with the names and shardings of `target`.

  Removes arrays from `state` as it goes, so that devices do not hold the state twice.
  """
  if source == layout:
    return state

  def places(name: str) -> list[tuple[str, int | None]]:
    location = layout.locate(name)
    if location is None:
      return [(name, None)]
    return [source.place(location.template, layer) for layer in location.layers]

  uses = collections.Counter(place for name in target for place, _ in places(name))

  def take(place: str, repeat: int | None) -> jax.Array:
    value = state[place]
    uses[place] -= 1
    if not uses[place]:
      del state[place]
    return value if repeat is None else value[repeat]

  result = {}
  # Sorted by source array, so that each is freed early.
  for name in sorted(target, key=places):
    values = [take(*place) for place in places(name)]
    location = layout.locate(name)
    value = values[0]
    if location is not None and location.stacked:
      of_index = dict(zip(location.indexes, values, strict=True))
      padding = jnp.zeros_like(value)
      value = jnp.stack([of_index.get(i, padding) for i in range(layout.stacked_size)])
    result[name] = jax.device_put(value, target[name].sharding)
    del value, values
  return result


def layout_in(metadata: Mapping[str, Any]) -> Layout:
  """Returns the layout in a checkpoint's metadata.

  Raises:
    ValueError, TypeError, KeyError: It is invalid.
  """
  layout = Layout(**metadata["layout"])
  scanned, *counts = dataclasses.astuple(layout)
  known = type(scanned) is bool and all(is_size(n) and n < 2**20 for n in counts)
  # Each chunk has a repeat at least; with 0 repeats there is only one chunk.
  groups = layout.stages * layout.chunks if known and layout.pattern else 0
  if not 0 < groups <= max(layout.repeats, 1) or layout.repeats > ranges.MOST_LAYERS:
    raise ValueError(f"metadata/metadata: invalid layout {metadata['layout']}")
  return layout


def tensor_of(shape: object, dtype: object) -> jax.ShapeDtypeStruct:
  """Returns an array's shape and dtype from a checkpoint's metadata.

  Raises:
    ValueError, TypeError: They are invalid.
  """
  if not isinstance(shape, list) or not all(map(is_size, shape)) or not isinstance(dtype, str):
    raise ValueError(f"metadata/metadata: invalid shape {shape} or dtype {dtype}")
  known = jnp.dtype(dtype)
  if not jnp.issubdtype(known, jnp.number) and not jnp.issubdtype(known, jnp.bool_):
    raise ValueError(f"metadata/metadata: invalid dtype {dtype}")
  return jax.ShapeDtypeStruct(tuple(shape), known)


def is_size(value: object) -> bool:
  """Returns whether a JSON value is a non-negative int64."""
  return type(value) is int and 0 <= value < 2**63
