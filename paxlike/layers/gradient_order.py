# SPDX-License-Identifier: Apache-2.0
"""The order in which a backward pass computes and adds gradients."""

from typing import Any

import jax
from flax import nnx

from paxlike.devices import mesh, xla_flags

# XLA for TPU v5e all-reduces gradients over so many chips; over fewer, it exchanges shards.
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


def after_weights(x: jax.Array, module: nnx.Module) -> tuple[jax.Array, Any]:
  """Returns (x, the module); the cotangent of x waits for those of the weights on some TPUs.

  XLA for TPU v5e computes an all-reduce of a gradient beside one matmul, mostly that of the next
  weight. It leaves a large gradient to the end of a layer, whose all-reduce then has nothing beside
  it. If the cotangent of x must wait for all of them, the matmul that computes it comes after. With
  other axes than `fsdp`, programs may become slower by that.

  Args:
    x: What the module's first matmuls read.
    module: A layer.
  """
  sizes = mesh.sizes_here(mesh.AXES)
  others = [size for axis, size in sizes.items() if axis != "fsdp"]
  is_summed = sizes.get("fsdp", 1) >= _LEAST_CHIPS and max(others) == 1
  if not is_summed or not xla_flags.fuses_all_reduces():
    return x, module
  graph, weights = nnx.split(module)
  x, weights = together(x, weights)
  return x, nnx.merge(graph, weights)
