# SPDX-License-Identifier: Apache-2.0
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo

from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers import flash_cpu, splash, tokamax, xla_chunked
from paxlike.layers.attention import chunked, kernels

pytestmark = pytest.mark.slow


def reference(q, k, v, scale, segments, *, window=None, soft_cap=None, sinks=None, bias=None):
  """NumPy, a query at a time."""
  out = np.zeros_like(q)
  group = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(q.shape[:3]):
    visible = np.arange(0 if window is None else max(0, t - window + 1), t + 1)
    if segments is not None:
      visible = visible[segments[b, visible] == segments[b, t]]
    logits = k[b, visible, n // group] @ q[b, t, n] * scale
    if soft_cap is not None:
      logits = soft_cap * np.tanh(logits / soft_cap)
    if bias is not None:
      logits = logits + bias[n, t, visible]
    weights = np.exp(logits)
    total = weights.sum() + (0 if sinks is None else np.exp(sinks[n]))
    out[b, t, n] = weights / total @ v[b, visible, n // group]
  return out


KERNELS = {
  "xla": kernels.xla,
  "xla_chunked": xla_chunked,
  "flash_cpu": flash_cpu,
  "splash": functools.partial(splash, interpret=True),
  "tokamax": functools.partial(tokamax, implementation="xla"),
}
REFUSES = {"flash_cpu": {"soft_cap", "sinks", "bias"}, "splash": {"bias"}, "tokamax": {"sinks"}}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
  """Each kernel that runs on a CPU; the rows of 7 tokens are several chunks."""
  if request.param == "tokamax":
    pytest.importorskip("tokamax")
  monkeypatch.setattr(chunked, "_CHUNK", 2)
  monkeypatch.setattr(kernels, "_MIN_SPAN", 2)
  return KERNELS[request.param]


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_kernel_equals_numpy(kernel, num_kv_heads, packed):
  random: Any = np.random.default_rng(0)
  q = random.normal(size=(2, 7, 4, 8)).astype(np.float32)
  k, v = random.normal(size=(2, 2, 7, num_kv_heads, 8)).astype(np.float32)
  segments: Any = (
    np.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2]], np.int32) if packed else None
  )
  got = kernel(q, k, v, scale=0.3, segments_BT=segments)
  np.testing.assert_allclose(got, reference(q, k, v, 0.3, segments), atol=1e-5)


def random_inputs():
  random: Any = np.random.default_rng(0)
  q = random.normal(size=(2, 7, 4, 8)).astype(np.float32)
  k, v = random.normal(size=(2, 2, 7, 2, 8)).astype(np.float32)
  more = {
    "window": 3,
    "soft_cap": 0.7,
    "sinks": random.normal(size=4).astype(np.float32),
    "bias": random.normal(size=(4, 7, 7)).astype(np.float32),
  }
  return q, k, v, more


@pytest.mark.parametrize(
  "names", [("window",), ("soft_cap",), ("sinks",), ("bias",), ("window", "sinks", "bias")]
)
def test_what_families_add_equals_numpy(kernel, names):
  q, k, v, more = random_inputs()
  given: Any = {name: more[name] for name in names}
  theirs = {"sinks": "sinks_N", "bias": "bias_NTS"}
  options: Any = {theirs.get(name, name): value for name, value in given.items()}
  segments = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 2, 2, 0]], np.int32)
  if REFUSES.get(kernels.name_of(kernel), set()).intersection(names):
    with pytest.raises(UserError, match="use xla_chunked"):
      kernel(q, k, v, scale=0.3, segments_BT=segments, **options)
    return
  got = kernel(q, k, v, scale=0.3, segments_BT=segments, **options)
  np.testing.assert_allclose(got, reference(q, k, v, 0.3, segments, **given), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 7, 8])
def test_chunks_have_the_gradient_of_the_whole(length, monkeypatch):
  monkeypatch.setattr(chunked, "_CHUNK", 2)
  random: Any = np.random.default_rng(1)
  q = random.normal(size=(2, length, 4, 8)).astype(np.float32)
  k, v = random.normal(size=(2, 2, length, 2, 8)).astype(np.float32)
  bias = random.normal(size=(4, length, length)).astype(np.float32)
  segments = np.sort(random.integers(1, 4, (2, length)))

  def value(kernel, q, k, v, bias):
    more = {"window": 3, "soft_cap": 2.0, "sinks_N": jnp.ones(4)}
    return jnp.sin(kernel(q, k, v, scale=0.3, segments_BT=segments, bias_NTS=bias, **more)).sum()

  expected = jax.grad(functools.partial(value, kernels.xla), (0, 1, 2, 3))(q, k, v, bias)
  got = jax.grad(functools.partial(value, xla_chunked), (0, 1, 2, 3))(q, k, v, bias)
  for one, other in zip(got, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_flash_cpu_has_the_gradient_of_xla(window, is_packed, monkeypatch):
  monkeypatch.setattr(kernels, "_MIN_SPAN", 2)
  q, k, v, _ = random_inputs()
  v = v[..., :6]  # Narrower than the keys, as in DeepSeek-V3.
  segments = np.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2]], np.int32)

  def value(kernel, q, k, v):
    given = {"segments_BT": segments if is_packed else None, "window": window}
    return jnp.sin(kernel(q, k, v, scale=0.3, **given)).sum()

  expected, got = (
    jax.grad(functools.partial(value, kernel), (0, 1, 2))(q, k, v)
    for kernel in (kernels.xla, flash_cpu)
  )
  for one, other in zip(got, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("shape", [{"data": 2, "tensor": 4}, {"context": 4}])
def test_flash_cpu_on_a_mesh_has_the_gradient_of_one_device(shape, monkeypatch):
  monkeypatch.setattr(kernels, "_MIN_SPAN", 4)
  random: Any = np.random.default_rng(0)
  q = random.normal(size=(2, 32, 4, 8)).astype(np.float32)
  k, v = random.normal(size=(2, 2, 32, 2, 8)).astype(np.float32)
  segments: Any = np.sort(random.integers(0, 4, (2, 32))).astype(np.int32)

  def value(q, k, v):
    return jnp.sin(flash_cpu(q, k, v, scale=0.3, segments_BT=segments, window=9)).sum()

  def gradients():
    return jax.jit(jax.grad(value, (0, 1, 2))).lower(q, k, v).compile()

  alone = gradients()
  with jax.set_mesh(MeshSpec(ici=shape).build(jax.devices()[: math.prod(shape.values())])):
    sharded = gradients()
    got = sharded(q, k, v)
  for one, other in zip(got, alone(q, k, v), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)
  # Also a device that has gathered a sequence takes a span of queries at a time.
  dots = [hlo.matmuls(program.as_text() or "") for program in (alone, sharded)]
  assert len(dots[0]) == len(dots[1]) >= 8 * 6


def test_the_memory_of_chunks_is_linear_in_the_length():
  def temporary(kernel, length):
    def value(q):
      return kernel(q, q, q, scale=1.0, segments_BT=None).sum()

    q = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    analysis: Any = jax.jit(jax.grad(value)).lower(q).compile().memory_analysis()
    return analysis.temp_size_in_bytes

  short, long = (temporary(xla_chunked, length) for length in (2048, 8192))
  assert long < 5 * short
  assert long < temporary(kernels.xla, 8192) / 8


def test_attention_to_the_cache_is_that_of_the_last_query():
  q, k, v, more = random_inputs()
  sinks, bias, soft_cap = more["sinks"], more["bias"], more["soft_cap"]
  for last in range(7):
    visible = np.broadcast_to(np.arange(7) <= last, (2, 7))
    got = kernels.cached(
      q[:, last],
      k.transpose(0, 2, 3, 1),
      v.swapaxes(1, 2),
      jnp.array(visible),
      scale=0.3,
      soft_cap=soft_cap,
      sinks_N=sinks,
      bias_BNS=jnp.broadcast_to(bias[:, last], (2, 4, 7)),
    )
    expected = reference(q, k, v, 0.3, None, soft_cap=soft_cap, sinks=sinks, bias=bias)
    np.testing.assert_allclose(got, expected[:, last], atol=1e-5)


def test_the_future_has_no_gradient():
  q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))

  def third_output(k, v):
    return kernels.xla(q, k, v, scale=1.0, segments_BT=None)[:, 2].sum()

  for gradient in jax.grad(third_output, (0, 1))(k, v):
    assert np.all(np.asarray(gradient[:, 3:]) == 0)
    assert np.any(np.asarray(gradient[:, :3]) != 0)
