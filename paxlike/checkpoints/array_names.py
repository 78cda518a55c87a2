# SPDX-License-Identifier: Apache-2.0
"""The dotted names under which the arrays of a training state are saved."""

from collections.abc import Mapping
from typing import Any

import jax

Flat = dict[str, Any]


def flatten(tree: Any) -> Flat:
  """Returns the leaves of a pytree under dotted names, such as "params.embedding.table"."""
  return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(like: Any, flat: Mapping[str, Any]) -> Any:
  """Returns a pytree of the structure of `like` with the leaves of `flat`; inverts `flatten`."""
  return jax.tree_util.tree_map_with_path(lambda path, _: flat[_name(path)], like)


def _name(path: tuple[Any, ...]) -> str:
  parts = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)
  return ".".join(map(str, parts))
