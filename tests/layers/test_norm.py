# SPDX-License-Identifier: Apache-2.0
"""Norms and their gradients equal those of PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from paxlike.devices import topology
from paxlike.layers import LayerNorm, RmsNorm


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16], ids=["x_f32", "x_bf16"])
@pytest.mark.parametrize(
  ("norm", "is_gpu"), [(LayerNorm, False), (LayerNorm, True), (RmsNorm, False)]
)
def test_values_and_gradients_are_those_of_pytorch(
  monkeypatch, norm, is_gpu, x_dtype, dtype, offset
):
  monkeypatch.setattr(topology, "is_gpu", lambda: is_gpu)
  random: Any = np.random.default_rng(0)
  graph, state = nnx.split(norm(24, offset=offset, epsilon=1e-3))
  weights = jax.tree.map(lambda w: jnp.asarray(random.normal(size=w.shape), dtype), state)
  x, dy = 3 + random.normal(size=(2, 2, 5, 24)).astype(np.float32)
  x = jnp.asarray(x, x_dtype)
  y, backward = jax.vjp(lambda x, weights: nnx.merge(graph, weights)(x), x, weights)
  dx, d_weights = backward(jnp.asarray(dy))

  pure = nnx.to_pure_dict(weights)
  torch_weights = {name: torch.tensor(np.asarray(w, np.float32)) for name, w in pure.items()}
  torch_x = torch.tensor(np.asarray(x, np.float32))
  for variable in (torch_x, *torch_weights.values()):
    variable.requires_grad = True
  scale, sizes = offset + torch_weights["scale"], (24,)
  if norm is LayerNorm:
    bias = torch_weights["bias"]
    torch_y = torch.nn.functional.layer_norm(torch_x, sizes, scale, bias, eps=1e-3)
  else:
    torch_y = torch.nn.functional.rms_norm(torch_x, sizes, scale, eps=1e-3)
  torch_y.backward(torch.tensor(dy))

  def equal(got, expected):
    tolerance = 1e-5 if {dtype, x_dtype} == {jnp.float32} else 0.02
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, tolerance, tolerance)

  equal(y, torch_y.detach())
  assert dx.dtype == x_dtype
  equal(dx, torch_x.grad)
  for name, gradient in nnx.to_pure_dict(d_weights).items():
    assert gradient.dtype == dtype
    equal(gradient, torch_weights[name].grad)
