# SPDX-License-Identifier: Apache-2.0
"""The yardstick: a GPT train step in plain JAX, as one writes it by hand for one device.

    python benchmarks/plain_gpt.py [--steps=N]

prints one JSON line. Four layers, 256 dims, 8 sequences of 256 tokens, float32: the model of

    paxlike --fdl_config=Synthetic126M --fdl.NUM_LAYERS=4 --fdl.MODEL_DIMS=256 ...

Neither tuned nor handicapped: parameters in a dict, einsums, a mean cross entropy, AdamW written
out, one jitted step that donates its state. On a CPU its loss is the costliest habit: logsumexp in
place of log_softmax takes a fifth off the step.
"""

import argparse
import functools
import json
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


class Sizes(NamedTuple):
  """The shape of the model and of its batch."""

  layers: int = 4
  model: int = 256
  heads: int = 4
  head: int = 64
  ffn: int = 1024
  vocab: int = 8192
  time: int = 256
  batch: int = 8


SIZES = Sizes()


def init(key: jax.Array, sizes: Sizes = SIZES) -> Params:
  """Draws the parameters: N(0, 0.02^2) matrices, zero biases, unit scales; all float32."""
  D, N, H, F = sizes.model, sizes.heads, sizes.head, sizes.ffn
  keys = iter(jax.random.split(key, 2 + 6 * sizes.layers))

  def normal(*shape: int) -> jax.Array:
    return 0.02 * jax.random.normal(next(keys), shape)

  def norm() -> Params:
    return {"scale": jnp.ones(D), "bias": jnp.zeros(D)}

  def layer() -> Params:
    return {
      "ln_1": norm(),
      "q": {"w": normal(D, N, H), "b": jnp.zeros((N, H))},
      "k": {"w": normal(D, N, H), "b": jnp.zeros((N, H))},
      "v": {"w": normal(D, N, H), "b": jnp.zeros((N, H))},
      "out": {"w": normal(N, H, D), "b": jnp.zeros(D)},
      "ln_2": norm(),
      "up": {"w": normal(D, F), "b": jnp.zeros(F)},
      "down": {"w": normal(F, D), "b": jnp.zeros(D)},
    }

  return {
    "token": normal(sizes.vocab, D),
    "position": normal(sizes.time, D),
    "layers": [layer() for _ in range(sizes.layers)],
    "ln_f": norm(),
  }


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
  mean = x.mean(-1, keepdims=True)
  variance = jnp.square(x - mean).mean(-1, keepdims=True)
  return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def attention(p: Params, x_BTD: jax.Array) -> jax.Array:
  q, k, v = (jnp.einsum("BTD,DNH->BTNH", x_BTD, p[n]["w"]) + p[n]["b"] for n in "qkv")
  logits_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(q.shape[-1])
  causal_TS = jnp.tril(jnp.ones(logits_BNTS.shape[-2:], bool))
  probs_BNTS = jax.nn.softmax(jnp.where(causal_TS, logits_BNTS, -1e30))
  y_BTNH = jnp.einsum("BNTS,BSNH->BTNH", probs_BNTS, v)
  return jnp.einsum("BTNH,NHD->BTD", y_BTNH, p["out"]["w"]) + p["out"]["b"]


def mlp(p: Params, x_BTD: jax.Array) -> jax.Array:
  y_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, p["up"]["w"]) + p["up"]["b"]
  y_BTF = jax.nn.gelu(y_BTF, approximate=True)
  return jnp.einsum("BTF,FD->BTD", y_BTF, p["down"]["w"]) + p["down"]["b"]


def loss_fn(params: Params, inputs_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
  """Returns the mean cross entropy, in nats per token."""
  x_BTD = params["token"][inputs_BT] + params["position"]
  for p in params["layers"]:
    x_BTD = x_BTD + attention(p, layer_norm(p["ln_1"], x_BTD))
    x_BTD = x_BTD + mlp(p, layer_norm(p["ln_2"], x_BTD))
  x_BTD = layer_norm(params["ln_f"], x_BTD)
  logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, params["token"])
  log_probs_BTV = jax.nn.log_softmax(logits_BTV)
  return -jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1).mean()


def init_state(key: jax.Array, sizes: Sizes = SIZES) -> Params:
  """Returns the train state: the parameters, AdamW's two moments and the step."""
  params = init(key, sizes)
  zeros = functools.partial(jax.tree.map, jnp.zeros_like)
  return {"params": params, "mu": zeros(params), "nu": zeros(params), "step": jnp.int32(0)}


@functools.partial(jax.jit, donate_argnums=0)
def train_step(
  state: Params, inputs_BT: jax.Array, targets_BT: jax.Array
) -> tuple[Params, jax.Array]:
  """One AdamW update (1e-3, betas 0.9 and 0.95, decay 0.1) after clipping to global norm 1."""
  learning_rate, b1, b2, eps, decay, max_norm = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0
  loss, grads = jax.value_and_grad(loss_fn)(state["params"], inputs_BT, targets_BT)
  norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
  grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, max_norm / norm), grads)
  step = state["step"] + 1
  mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mu"], grads)
  nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["nu"], grads)

  def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
    direction = (m / (1 - b1**step)) / (jnp.sqrt(v / (1 - b2**step)) + eps)
    return p - learning_rate * (direction + decay * p)

  params = jax.tree.map(update, state["params"], mu, nu)
  return {"params": params, "mu": mu, "nu": nu, "step": step}, loss


def random_batch(seed: int, sizes: Sizes = SIZES) -> tuple[np.ndarray, np.ndarray]:
  """Returns inputs and targets [B, T] int32: uniform random tokens."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, sizes.vocab, (sizes.batch, sizes.time + 1), dtype=np.int32)
  return tokens[:, :-1], tokens[:, 1:]


def cpu_seconds() -> float:
  """CPU time of this process so far, all threads, user and system."""
  return time.process_time()


class PlainGpt:
  """The yardstick as an object: build once, then call `step()` as often as wanted."""

  def __init__(self, sizes: Sizes = SIZES):
    self.sizes = sizes
    self.state = jax.jit(init_state, static_argnums=1)(jax.random.key(0), sizes)
    self.num_steps = 0

  @property
  def num_parameters(self) -> int:
    return sum(p.size for p in jax.tree.leaves(self.state["params"]))

  def step(self) -> float:
    """Takes one step on a fresh batch, waits for it, and returns the loss."""
    batch = random_batch(self.num_steps, self.sizes)
    self.state, loss = train_step(self.state, *batch)
    self.num_steps += 1
    return float(loss)


def main() -> None:
  parser = argparse.ArgumentParser(description="Measures a GPT train step in plain JAX.")
  parser.add_argument("--steps", type=int, default=20, help="measured steps (default 20)")
  num_steps = parser.parse_args().steps
  plain = PlainGpt()
  first_loss = plain.step()
  # Since the process began: imports, initialization and compilation are in it.
  first_step_cpu_seconds = cpu_seconds()
  for _ in range(3):
    plain.step()
  walls, cpus, loss = [], [], first_loss
  for _ in range(num_steps):
    wall, cpu = time.perf_counter(), cpu_seconds()
    loss = plain.step()
    walls.append(time.perf_counter() - wall)
    cpus.append(cpu_seconds() - cpu)
  report = {
    "benchmark": "plain_gpt",
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
    "parameters": plain.num_parameters,
    "first_step_cpu_seconds": round(first_step_cpu_seconds, 2),
    "step_seconds": round(statistics.median(walls), 4),
    "step_cpu_seconds": round(statistics.median(cpus), 4),
    "first_loss": round(first_loss, 4),
    "last_loss": round(loss, 4),
  }
  print(json.dumps(report))


if __name__ == "__main__":
  main()
