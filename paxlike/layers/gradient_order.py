# SPDX-License-Identifier: Apache-2.0
"""The order in which a backward pass computes and adds gradients."""

import math
from typing import Any

import jax
from flax import nnx

from paxlike.devices import xla_flags

# From so many chips on, XLA for TPU v5e all-reduces gradients (libtpu 0.0.52; 8, 16, 32, 64 and 256
# were tried); over fewer, it reduce-scatters them or exchanges shards between matmuls.
_LEAST_CHIPS = 64


@jax.custom_vjp
def fork(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (x, x); in the backward pass, the cotangent of the first is the first addend.

  As cuBLAS writes a product, it can add one array to it. XLA uses that only for the first addend of
  a sum. So a linear map that reads the first x adds the sum of all other cotangents to its product.
  """
  return x, x


fork.defvjp(lambda x: (fork(x), None), lambda _, cotangents: (cotangents[0] + cotangents[1],))


@jax.custom_vjp
def together(x: jax.Array, weights: Any) -> tuple[jax.Array, Any]:
  """Returns (x, weights); in the backward pass, the cotangent of x waits for those of the weights.

  Where layers are unrolled, XLA for GPUs else delays the gradients of the weights of all layers
  beside collectives, and holds the operands of their matmuls until then.

  Args:
    x: The input of a layer.
    weights: A pytree of the weights of the layer.
  """
  return x, weights


def _forward(x: jax.Array, weights: Any) -> tuple[tuple[jax.Array, Any], None]:
  return (x, weights), None


def _backward(_: None, cotangents: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
  leaves, tree = jax.tree.flatten(cotangents)
  # Integer weights have none.
  real = [n for n, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
  tied = jax.lax.optimization_barrier([leaves[n] for n in real])
  for n, leaf in zip(real, tied, strict=True):
    leaves[n] = leaf
  return jax.tree.unflatten(tree, leaves)


together.defvjp(_forward, _backward)


def after_weights(x: jax.Array, modules: Any) -> tuple[jax.Array, Any]:
  """Returns (x, modules); on TPU v5e, what reads the cotangent of x waits for those of the weights.

  XLA for TPU v5e computes the all-reduce of a gradient beside one matmul, mostly that of the next
  weight. It computes a large gradient last in each layer, and nothing is left to compute beside its
  all-reduce. If the cotangent of x is used only after all of them, the matmul that computes it can
  come last, beside the last all-reduce. Nothing waits on other devices, with other mesh axes than
  `fsdp`, or over fewer than 64 chips, where it did not help. It mostly makes steps longer if more
  than the layer's input is saved for the backward pass, so blocks do not call it then.

  Args:
    x: What the first matmuls of a layer read.
    modules: A pytree of the modules of the layer that have large weights.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  is_fsdp = sizes.get("fsdp", 1) == math.prod(sizes.values())
  if not is_fsdp or sizes.get("fsdp", 1) < _LEAST_CHIPS or not xla_flags.fuses_all_reduces():
    return x, modules
  graph, weights = nnx.split(modules)
  x, weights = together(x, weights)
  return x, nnx.merge(graph, weights)
