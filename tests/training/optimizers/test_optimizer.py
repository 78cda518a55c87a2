# SPDX-License-Identifier: Apache-2.0
import functools
import typing
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import adamw, batch, tiny

from paxlike import layers
from paxlike.config import ranges, type_words
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.experiments.gpt import Gpt3_52k
from paxlike.training import optimizers, train_state
from paxlike.training.train_step import make_train_step

LINEAR = layers.Definition(layers.Linear({"model": 3}, {"mlp": 4}, role="up", use_bias=True))
WEIGHTS = {"a.w": LINEAR.weights["w"]}


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("decayed", [optimizers.everything, optimizers.matrices])
def test_adamw_equals_numpy(clip_norm, decayed):
  random = np.random.default_rng(0)
  params = {"w": random.normal(size=(3, 4)), "b": random.normal(size=4)}
  rate, b1, b2, eps, decay = 0.1, 0.9, 0.99, 1e-3, 0.05
  optimizer = optimizers.adamw(
    learning_rate=optimizers.constant(peak=rate),
    b1=b1,
    b2=b2,
    eps=eps,
    weight_decay=decay,
    decayed=decayed,
    clip_norm=clip_norm,
  )
  transform = optimizer.transformation(LINEAR)
  ours = jax.tree.map(jnp.array, params)
  state = transform.init(ours)
  mean: dict[str, Any] = dict.fromkeys(params, 0.0)
  square: dict[str, Any] = dict.fromkeys(params, 0.0)
  for step in range(1, 5):
    grads = {name: random.normal(size=value.shape) for name, value in params.items()}
    updates, state = transform.update(jax.tree.map(jnp.array, grads), state, ours)
    ours = jax.tree.map(jnp.add, ours, updates)
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    scale = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
    for name, value in params.items():
      g = grads[name] * scale
      mean[name] = b1 * mean[name] + (1 - b1) * g
      square[name] = b2 * square[name] + (1 - b2) * g**2
      update = mean[name] / (1 - b1**step) / (np.sqrt(square[name] / (1 - b2**step)) + eps)
      lost = decay * value if decayed is optimizers.everything or name == "w" else 0.0
      params[name] = value - rate * (update + lost)
  for name, value in params.items():
    np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("register", "knob", "names"),
  [
    (optimizers.register_schedule, "LR_SCHEDULE", optimizers.SCHEDULES),
    (optimizers.register_optimizer, "OPTIMIZER", optimizers.OPTIMIZERS),
  ],
)
def test_a_registered_name_is_a_choice(monkeypatch, register, knob, names):
  with pytest.raises(UserError, match=rf"^{knob}='mine': expected one of .*, got 'mine'\."):
    Gpt3_52k(**{knob: "mine"})
  monkeypatch.setitem(names, "mine", None)  # Removed after the test.
  del names["mine"]
  register("mine")(lambda experiment: experiment.LEARNING_RATE)
  experiment = Gpt3_52k(LEARNING_RATE=0.5, **{knob: "MINE"})
  made = experiment.schedule() if knob == "LR_SCHEDULE" else experiment.optimizer()
  assert made == 0.5 and "ADAM_BETA1" not in experiment.read_names()
  assert type("Own", (Gpt3_52k,), {knob: "mine"})().values()[knob].value == "mine"
  assert "mine" in type_words.choices(Gpt3_52k.knobs()[knob].type)


def test_a_name_is_registered_once():
  for register, name in (
    (optimizers.register_schedule, "constant"),
    (optimizers.register_optimizer, "adamw"),
  ):
    with pytest.raises(UserError, match=f"'{name}' is already registered: "):
      register(name)(lambda experiment: experiment)


def test_moments_in_fewer_bits_are_right_on_average():
  """Each change of the means is far below the last bit of bfloat16."""
  make = functools.partial(optimizers.adamw, b1=0.999, b2=0.9999, eps=1e-8, weight_decay=0.0)
  make = functools.partial(make, learning_rate=optimizers.constant(peak=1.0), clip_norm=None)
  params = {"a.w": jnp.zeros(4000)}
  grads = {"a.w": jnp.linspace(0.5, 2.0, 4000)}
  means = []
  for dtype in ("float32", "bfloat16"):
    transform = optimizers.resolved(make(moment_dtype=dtype).transform, WEIGHTS)
    state: Any = transform.init(params)
    update = jax.jit(lambda state, transform=transform: transform.update(grads, state, params)[1])
    for _ in range(300):
      state = update(state)
    moments: Any = state[1]
    assert moments.mu["a.w"].dtype == moments.nu["a.w"].dtype == dtype
    means.append([np.asarray(x["a.w"], np.float32).mean() for x in (moments.mu, moments.nu)])
  np.testing.assert_allclose(means[1], means[0], rtol=0.005)


@pytest.mark.parametrize("name", [n for n, make in optimizers.OPTIMIZERS.items() if make is None])
def test_the_state_does_not_depend_on_the_dtype_of_the_weights(name):
  """And an update leaves its dtypes as they are: it is compiled once."""
  knobs = {"OPTIMIZER": name, "LEARNING_RATE": 0.1, "ADAFACTOR_MOMENTUM": 0.9}
  optimizer: Any = fdl.build(Gpt3_52k(**knobs).optimizer())
  transform = optimizer.transformation(LINEAR)
  states = []
  for dtype in ("float32", "bfloat16"):
    params: Any = {n: jnp.ones(spec.shape, dtype) for n, spec in LINEAR.weights.items()}
    gradients: Any = {n: jnp.ones(spec.shape, jnp.float32) for n, spec in LINEAR.weights.items()}
    states.append(jax.eval_shape(transform.init, params))
    updates, after = jax.eval_shape(transform.update, gradients, states[-1], params)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, states[-1])
    assert {update.dtype for update in updates.values()} == {jnp.dtype("float32")}
  assert states[0] == states[1]


@pytest.mark.slow
def test_weights_in_fewer_bits_move_as_far():
  """Each update is below half of the last bit of bfloat16."""
  optimizer = adamw(peak=1e-4, weight_decay=0.0, eps=1e-8)
  built = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  name, ends = "stack.layers.0.mlp.up.w", []
  for dtype in ("float32", "bfloat16"):
    definition = tiny(weight_dtype=dtype)
    with jax.set_mesh(built):
      state = train_state.create(definition, optimizer, built, seed=1)
      start = np.asarray(state.params[name], np.float32)
      step = jax.jit(make_train_step(definition, optimizer, seed=1))
      for _ in range(20):
        state, _ = step(state, batch())
    assert {weight.dtype for weight in state.params.values()} == {jnp.dtype(dtype)}
    assert {moment.dtype for moment in state.opt_state[1].mu.values()} == {jnp.dtype("float32")}
    ends.append(np.asarray(state.params[name], np.float32))
  way = ends[0] - start
  assert np.median(np.abs(way)) / 20 < np.median(np.abs(start)) / 2**9
  np.testing.assert_allclose(
    ((ends[1] - start) * np.sign(way)).mean(), np.abs(way).mean(), rtol=0.1
  )


@pytest.mark.parametrize("beta", ["b1", "b2"])
def test_the_slowest_decay_of_a_mean_moves_weights_as_far(beta):
  slowest = typing.get_args(ranges.Probability)[1].most
  given = {"b1": 0.9, "b2": 0.99, beta: slowest}
  optimizer = optimizers.adamw(
    learning_rate=optimizers.constant(peak=1.0), eps=1e-8, weight_decay=0.0, clip_norm=None, **given
  )
  params = {"a.w": jnp.zeros(3)}
  transform = optimizers.resolved(optimizer.transform, WEIGHTS)
  state, update = transform.init(params), jax.jit(transform.update)
  for _ in range(5):
    updates, state = update({"a.w": jnp.ones(3)}, state, params)
    np.testing.assert_allclose(updates["a.w"], -1.0, rtol=0.2)
