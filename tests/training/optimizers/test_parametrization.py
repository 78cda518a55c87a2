# SPDX-License-Identifier: Apache-2.0
"""muP and CompleteP: the factors of their papers, and activations that do not grow with width."""

import dataclasses
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.shrunk import ONE_OF_EACH, shrunk
from helpers.tiny_model import batch

from paxlike import fiddlers, layers, registry
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.experiments.llama import SyntheticLLaMA70B
from paxlike.layers.decoder import forward
from paxlike.training import optimizers, train_state
from paxlike.training.optimizers.parametrization import Parametrization
from paxlike.training.train_step import make_train_step

WIDER = Parametrization(width=4.0, depth=2.0)


def test_rates_and_epsilons_are_those_of_the_paper():
  """Table 1 of arXiv:2505.01618 with alpha 1: m_N is 4, m_L is 2."""
  found = {}
  for name, spec in shrunk("Mixtral8x7B", scan=True).weights.items():
    if spec.trained:
      key = name.rsplit("stack.pattern.0.", maxsplit=1)[-1]
      found[key] = WIDER.rate(spec), WIDER.epsilon(spec)
  hidden = ("attention.query.w", "attention.output.w", "mlp.experts.up.w", "mlp.experts.down.w")
  for name in (*hidden, "mlp.router.w"):
    assert found[name] == (1 / 4, 1 / 4 / 2), name
  assert found["attention_norm.scale"] == (1, 1 / 4 / 2)
  assert found["embedding.table"] == (1, 1 / 4)
  # The head's initial weights are divided by the width, not its logits: steps are divided, too.
  assert found["head.w"] == (1 / 4, 1)


def test_muon_s_rates_shrink_by_how_its_steps_grow():
  specs = shrunk("Mixtral8x7B", scan=True).weights
  cases: Any = (("orthogonal", 1, 1 / 2), ("orthogonal_rms", 1 / 2, 1 / 4))
  for rule, hidden, router in cases:
    made = Parametrization(width=4.0, rule=rule)
    assert made.rate(specs["stack.pattern.0.attention.query.w"]) == hidden
    assert made.rate(specs["stack.pattern.0.mlp.router.w"]) == router
    assert made.rate(specs["head.w"]) == 1 / 4  # By AdamW.


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_base_model_itself_is_unchanged(optimizer):
  knobs = {"OPTIMIZER": optimizer, "MODEL_DIMS": 64, "NUM_HEADS": 8, "NUM_LAYERS": 2}
  standard = SyntheticLLaMA70B(**knobs).trainer()
  base = {"BASE_MODEL_DIMS": 64, "BASE_NUM_LAYERS": 2, "BASE_DIMS_PER_HEAD": 8}
  same = SyntheticLLaMA70B(**knobs, **base, PARAMETRIZATION="completep").trainer()
  factors = same.optimizer.parametrization
  assert (factors.width, factors.depth) == (1, 1)
  for node in (*fiddlers.select(same, layers.Block), *fiddlers.select(same, layers.Embedding)):
    assert getattr(node, "residual_scale", 1) == getattr(node, "logits_scale", 1) == 1
  del standard.optimizer, same.optimizer
  a, b = (np.asarray(one) for one in map(first_logits, (standard, same)))
  np.testing.assert_array_equal(a, b)


def first_logits(graph: Any) -> jax.Array:
  model: Any = fdl.build(graph.model)
  definition = layers.Definition(model)
  built = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  with jax.set_mesh(built):
    params = train_state.init_params(definition, built, seed=0)
    return forward(definition, params, batch(2))[0]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_family_takes_a_parametrization(name):
  """Scales that families derive from the width stay those of the base model."""
  graph = registry.find(name)().trainer()
  fiddlers.shrink(graph)
  (decoder,) = fiddlers.select(graph, layers.Decoder)
  before = [
    (getattr(node, "scale", 1.0), getattr(node, "logits_scale", 1.0))
    for node in fiddlers.select(graph, layers.Embedding)
  ]
  fiddlers.parametrize(graph, base_dim=decoder.dim // 4, base_layers=1)
  (factors,) = (
    node.parametrization
    for kind in (optimizers.adamw, optimizers.descent)
    for node in fiddlers.select(graph, kind)
  )
  assert factors.width == 4 and factors.depth > 1
  for node in fiddlers.select(graph, layers.Block):
    assert node.residual_scale == 1 / factors.depth
  for node, (scale, logits) in zip(fiddlers.select(graph, layers.Embedding), before, strict=True):
    assert getattr(node, "scale", 1.0) == (1.0 if scale == 1 else scale / 2)
    if getattr(decoder, "head", None) is None:
      assert node.logits_scale == (1 / 4 if logits == 1 else logits / 2)
  assert fdl.build(graph).definition.num_params > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Speedrun", "Gemma2_2B", "SyntheticLLaMA7B", "Gpt3_52k"])
def test_initial_weights_shrink_by_the_root_of_the_width(name):
  """Whatever they were drawn by: a given deviation, or one that is derived from the inputs."""
  deviations = []
  for times in (1, 4):
    heads = {"NUM_HEADS": 4 * times, "MODEL_DIMS": 64 * times, "HIDDEN_DIMS": 128 * times}
    knobs: dict[str, Any] = heads | {"NUM_LAYERS": 2, "VOCAB_SIZE": 64}
    base = {"PARAMETRIZATION": "mup", "BASE_MODEL_DIMS": 64}
    graph = registry.find(name)(**knobs, **base).trainer()
    model: Any = fdl.build(graph.model)
    definition, built = layers.Definition(model), MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
    with jax.set_mesh(built):
      params = train_state.init_params(definition, built, seed=0)
    (query, *_) = (w for n, w in params.items() if n.endswith("attention.query.w"))
    deviations.append(float(np.std(query)))
  assert deviations[1] / deviations[0] == pytest.approx(1 / 2, rel=0.05)


@pytest.mark.parametrize(
  ("name", "expected"),
  # A scale that follows from the width of the heads, and one that is given for those of the base.
  [("SyntheticLLaMA7B", 32**-0.5 / 2), ("Gemma2_2B", 32**-0.5 / 2), ("Gemma2_27B", 144**-0.5 / 4)],
)
def test_logits_of_wider_heads_are_divided_by_their_width(name, expected):
  base = {"PARAMETRIZATION": "mup", "BASE_MODEL_DIMS": 64, "BASE_DIMS_PER_HEAD": 8}
  graph = registry.find(name)(**base, DIMS_PER_HEAD=32, MODEL_DIMS=64, NUM_HEADS=2).trainer()
  for node in fiddlers.select(graph, layers.Attention):
    assert node.scale == pytest.approx(expected)


def test_a_number_has_no_width():
  norm = shrunk("SyntheticLLaMA70B").weights["norm.scale"]
  scalar = dataclasses.replace(norm, shape=(), dims=())
  assert WIDER.rate(scalar) == 1
  assert WIDER.epsilon(scalar) == 1 / 4 / 2


def test_what_cannot_be_scaled_is_refused():
  with pytest.raises(UserError, match=r"^PARAMETRIZATION=mup needs BASE_MODEL_DIMS\.$"):
    SyntheticLLaMA70B(PARAMETRIZATION="mup").trainer()
  with pytest.raises(UserError, match=r"^PARAMETRIZATION=completep needs BASE_NUM_LAYERS\.$"):
    SyntheticLLaMA70B(PARAMETRIZATION="completep", BASE_MODEL_DIMS=64).trainer()
  latent = registry.find("DeepSeekV3")().trainer()
  with pytest.raises(UserError, match=r"^QK_NORM: latent attention has norms of its own"):
    fiddlers.qk_norm(latent)
  with pytest.raises(UserError, match=r"^BASE_DIMS_PER_HEAD: the heads of latent attention"):
    fiddlers.parametrize(latent, base_dim=64, base_head_dim=16)


WIDTHS = (64, 128, 256)


def activations(width: int, *, steps: int = 6, **knobs: Any) -> tuple[float, float]:
  """The root mean square of logits before and after steps on the same batch."""
  experiment = registry.find("SyntheticLLaMA7B")(
    MODEL_DIMS=width,
    NUM_HEADS=width // 16,
    HIDDEN_DIMS=2 * width,
    NUM_LAYERS=2,
    VOCAB_SIZE=96,
    FPROP_DTYPE="float32",
    USE_REPEATED_LAYER=False,
    LEARNING_RATE=0.01,
    LR_SCHEDULE="constant",
    INIT_STD=0.1,
    **knobs,
  )
  graph = experiment.trainer()
  model: Any = fdl.build(graph.model)
  optimizer: Any = fdl.build(graph.optimizer)
  definition = layers.Definition(model)
  built, given = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1]), batch(4)
  with jax.set_mesh(built):
    state = train_state.create(definition, optimizer, built, seed=0)
    size = jax.jit(
      lambda params: jnp.sqrt(jnp.square(forward(definition, params, given)[0]).mean())
    )
    step, before = jax.jit(make_train_step(definition, optimizer, seed=0)), size(state.params)
    for _ in range(steps):
      state, _ = step(state, given)
    return float(before), float(size(state.params))


@pytest.mark.slow
def test_logits_grow_with_the_width_in_the_standard_parametrization_only():
  """By Muon; test_transfer.py shows it of AdamW."""
  slopes = {}
  for kind in ("standard", "mup"):
    knobs: dict[str, Any] = {"OPTIMIZER": "muon", "USE_TIED_EMBEDDING": False}
    if kind != "standard":
      knobs |= {"PARAMETRIZATION": kind, "BASE_MODEL_DIMS": WIDTHS[0]}
    after = [activations(width, **knobs)[1] for width in WIDTHS]
    slopes[kind] = np.polyfit(np.log(WIDTHS), np.log(after), 1)[0]
  assert abs(slopes["mup"]) < 0.15 < slopes["standard"] / 2, slopes
