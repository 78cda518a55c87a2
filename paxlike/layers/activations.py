# SPDX-License-Identifier: Apache-2.0
"""Activations of feed-forward layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers.precision import cpu_dots

# up -> hidden, or (gate, up) -> hidden.
Activation = Callable[..., jax.Array]


@configurable
@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
  """GELU, tanh approximation (Hendrycks and Gimpel, 2016).

  x is the only residual. XLA can then use cuBLAS's GELU epilogue, which also writes x.
  """
  return jax.nn.gelu(x)


def _gelu_forward(x):
  return jax.nn.gelu(x), x


def _gelu_backward(x, cotangent):
  return jax.vjp(jax.nn.gelu, jax.lax.optimization_barrier(x))[1](cotangent)


gelu.defvjp(_gelu_forward, _gelu_backward)


@configurable
def squared_relu(x: jax.Array) -> jax.Array:
  """relu(x)^2 (So et al., 2021, arXiv:2109.08668)."""
  return jnp.square(jax.nn.relu(x))


@configurable
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """silu(gate) * up (Shazeer, 2020)."""
  return jax.nn.silu(gate) * up


@configurable
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """gelu(gate) * up, with the tanh approximation (Shazeer, 2020)."""
  return jax.nn.gelu(gate) * up


@configurable
def clamped_swiglu(
  gate: jax.Array, up: jax.Array, *, alpha: ranges.Finite = 1.702, limit: ranges.PositiveFloat = 7.0
) -> jax.Array:
  """The activation of gpt-oss: SwiGLU with `gate` and `up` clamped, and 1 added to `up`."""
  gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
  return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


def is_elementwise(activation: Activation) -> bool:
  """Returns whether each number is known to depend on those in its place alone."""
  while isinstance(activation, functools.partial):
    activation = activation.func
  ours = gelu, squared_relu, swiglu, geglu, clamped_swiglu
  of_jax = jax.nn.relu, jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid, jnp.tanh, jax.nn.tanh
  return activation in (*ours, *of_jax)


def activate(activation: Activation, *inputs: jax.Array) -> jax.Array:
  """Returns `activation` of inputs of one shape and dtype, in that dtype.

  On CPUs, it is computed in float32 and rounded once: XLA would round to bfloat16 after each
  operation. The backward pass computes it again from the inputs, which is faster than to read saved
  values. So there is no forward-mode derivative on CPUs.
  """
  return _in_float32(activation, *inputs) if cpu_dots.on_cpu() else activation(*inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_float32(activation: Activation, *inputs: jax.Array) -> Any:
  return _computed_in_float32(activation, *inputs)


def _computed_in_float32(activation: Activation, *inputs: jax.Array) -> jax.Array:
  return activation(*(x.astype(jnp.float32) for x in inputs)).astype(inputs[0].dtype)


def _forward(activation: Activation, *inputs: jax.Array) -> tuple[jax.Array, Any]:
  return _computed_in_float32(activation, *inputs), inputs


def _backward(activation: Activation, inputs: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
  function = functools.partial(_computed_in_float32, activation)
  return jax.vjp(function, *jax.lax.optimization_barrier(inputs))[1](cotangent)


_in_float32.defvjp(_forward, _backward)
