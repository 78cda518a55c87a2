# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization, against NumPy; and runs of it, with adapters and in full."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.program import curve, run
from helpers.tiny_model import SEQ_LEN, VOCAB, tiny

import paxlike
from paxlike.convert.main import run as convert
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers.decoder import forward
from paxlike.training import train_state
from paxlike.training.objectives import Dpo


def log_probability(logits_of, params, tokens, weights):
  """Returns that of one answer on its own; what follows it is of no account."""
  inputs = np.pad(tokens[:-1], (0, SEQ_LEN + 1 - len(tokens)))
  logits = np.asarray(logits_of(params, {"inputs": inputs[None]})[0], np.float64)
  logits = logits[0, : len(tokens) - 1]
  log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  return (log[np.arange(len(tokens) - 1), tokens[1:]] * weights[1:]).sum()


def weights_of(definition):
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  return train_state.init_params(definition, mesh, seed=0)


def pairs(count):
  """Returns a batch of pairs of random answers, the last row a filling; and the answers."""
  rng = np.random.default_rng(0)
  names = ("inputs", "targets", "segments", "positions")
  batch: dict = {name: np.zeros((count + 1, SEQ_LEN), np.int32) for name in names}
  batch["weights"] = np.zeros((count + 1, SEQ_LEN), np.float32)
  answers = []
  for row in range(count):
    at, pair = 0, []
    for segment in (1, 2):
      tokens = rng.integers(0, VOCAB, rng.integers(4, SEQ_LEN // 2))
      weights = (np.arange(len(tokens)) >= 2).astype(np.float32)
      size = len(tokens) - 1
      here = (row, slice(at, at + size))
      batch["inputs"][here], batch["targets"][here] = tokens[:-1], tokens[1:]
      batch["weights"][here], batch["segments"][here] = weights[1:], segment
      batch["positions"][here] = np.arange(size)
      pair.append((tokens, weights))
      at += size
    answers.append(pair)
  return {name: jnp.array(array) for name, array in batch.items()}, answers


@pytest.mark.slow
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_its_loss_is_that_of_the_paper(label_smoothing):
  definition = tiny()
  params = weights_of(definition)
  keys = jax.random.split(jax.random.key(1), len(params))
  other = {
    name: w + 0.1 * jax.random.normal(key, w.shape)
    for key, (name, w) in zip(keys, params.items(), strict=True)
  }
  batch, answers = pairs(3)
  dpo = Dpo(beta=0.3, label_smoothing=label_smoothing)

  def loss(params, reference):
    total, aux = dpo.total(definition.bind(params), definition.bind(reference), batch, None)
    return total / dpo.weight(batch), aux

  differentiated = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (value, aux), gradient = differentiated(other, params)
  logits_of = jax.jit(functools.partial(forward, definition))
  margins = []
  for pair in answers:
    rewards = [
      0.3 * (log_probability(logits_of, other, *one) - log_probability(logits_of, params, *one))
      for one in pair
    ]
    margins.append(rewards[0] - rewards[1])
  margins = np.array(margins)
  wanted = (1 - label_smoothing) * np.log1p(np.exp(-margins))
  wanted += label_smoothing * np.log1p(np.exp(margins))
  np.testing.assert_allclose(value, wanted.mean(), rtol=1e-4)
  reported = {name: of[0] / of[1] for name, of in aux.metrics.items()}
  np.testing.assert_allclose(reported["reward_margin"], margins.mean(), rtol=1e-3)
  np.testing.assert_allclose(reported["reward_accuracy"], (margins > 0).mean())
  assert all(not g.any() for g in gradient[1].values())
  assert any(g.any() for g in gradient[0].values())
  (value, _), _ = differentiated(params, params)
  np.testing.assert_allclose(value, np.log(2), rtol=1e-6)


def test_no_logits_are_kept_for_the_gradient_and_a_pair_has_two_answers():
  definition = tiny()
  params = weights_of(definition)
  batch, _ = pairs(3)
  batch["weights"] = batch["weights"].at[0].multiply(batch["segments"][0] != 2)
  dpo = Dpo()
  assert dpo.weight(batch) == 2

  def loss(params):
    return dpo.total(definition.bind(params), definition.bind(params), batch, None)[0]

  kept = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
  logits = batch["inputs"].size * VOCAB
  assert max(leaf.size for leaf in jax.tree.leaves(kept)) < logits


PREFER = """
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama

class Tiny(Llama):
  VOCAB_SIZE = 257
  MAX_SEQ_LEN = 48
  NUM_LAYERS = 1
  MODEL_DIMS = 32
  HIDDEN_DIMS = 64
  NUM_HEADS = 2
  NUM_KV_HEADS = 2
  FPROP_DTYPE = "float32"
  PERCORE_BATCH_SIZE = 2
  GRADIENT_ACCUMULATION_STEPS = 2
  LEARNING_RATE = 0.01
  LR_SCHEDULE = "constant"
  SUMMARY_INTERVAL_STEPS = 1
  EVAL_INTERVAL_STEPS = 0
  MAX_STEPS = 8

class Prefer(datasets.Preferences, Tiny):
  pass

class Reward(datasets.RewardPairs, Tiny):
  pass
"""


@pytest.fixture
def prefer(tmp_path, monkeypatch):
  """Trains the experiment above on made preferences: what is said kindly."""
  (tmp_path / "my_preferences.py").write_text(PREFER)
  monkeypatch.syspath_prepend(str(tmp_path))
  rows = [
    {"prompt": f"say {i}", "chosen": f" please {i}", "rejected": f" never {i}"} for i in range(80)
  ]
  path = tmp_path / "pairs.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))

  def train(folder, *flags, kind="Prefer"):
    data = (f"--fdl_config=my_preferences.{kind}", f"--fdl.DATA_PATH={path}")
    return run(*data, f"--job_log_dir={tmp_path / folder}", *flags)

  return train


CODE = ("--fdl_allow_modules=my_preferences",)


def told(folder, kind):
  """The records of a run."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.slow
def test_adapters_learn_what_is_preferred_and_go_on_from_any_step(prefer, tmp_path):
  flags = ("--fdl.USE_LORA=True", "--fdl.LORA_DROPOUT=0.1")
  assert prefer("whole", *flags) == 0
  assert prefer("parts", *flags, "--fdl.num_steps=3") == 0
  assert prefer("parts", *flags) == 0
  assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
  first, *_, last = told(tmp_path / "whole", "train")
  assert first["loss"] == pytest.approx(np.log(2), rel=1e-4) and first["total_weights"] == 16
  assert last["loss"] < 0.5 and last["reward_accuracy"] == 1
  assert last["reward_chosen"] > last["reward_rejected"]
  (evaluated,) = told(tmp_path / "whole", "eval")
  # Of the model alone; what its rewards are measured from prefers the shorter answer.
  assert evaluated["preference_acc"] >= 0.7 and evaluated["num_examples"] == 8


@pytest.mark.slow
def test_the_reference_of_a_tuned_model_is_what_it_began_with(prefer, tmp_path):
  """Not what its folder holds now."""
  base = tmp_path / "base"
  assert prefer("base", "--fdl.MAX_STEPS=2") == 0
  restore = f"--fdl.CHECKPOINT_RESTORE_PATH={base}"
  assert prefer("whole", restore) == 0
  assert prefer("parts", restore, "--fdl.num_steps=3") == 0
  assert prefer("base", "--fdl.MAX_STEPS=4") == 0
  assert prefer("parts") == 0
  assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
  first, *_, last = told(tmp_path / "whole", "train")
  assert first["loss"] == pytest.approx(np.log(2), rel=1e-5)
  assert last["loss"] < 0.5 and last["reward_accuracy"] == 1


@pytest.mark.slow
def test_a_reward_model_of_a_tuned_one_learns_what_is_preferred(prefer, tmp_path, capsys):
  base, folder = tmp_path / "base", tmp_path / "reward"
  assert prefer("base", "--fdl.PREFERENCE_LOSS=kto") == 0
  first, *_, last = told(base, "train")
  assert first["loss"] == pytest.approx(0.5, rel=1e-4) and last["loss"] < first["loss"]
  assert last["reward_chosen"] > last["reward_rejected"]
  (evaluated,) = told(base, "eval")
  assert evaluated["desirable_log_pplx"] < evaluated["undesirable_log_pplx"]

  restore = f"--fdl.CHECKPOINT_RESTORE_PATH={base}"
  assert prefer("reward", restore, kind="Reward") == 2
  assert "head.w" in (said := capsys.readouterr().err) and "CHECKPOINT_IGNORE_RULES" in said
  assert prefer("reward", restore, "--fdl.CHECKPOINT_IGNORE_RULES=head", kind="Reward") == 0
  assert told(folder, "train")[-1]["reward_accuracy"] == 1
  (evaluated,) = told(folder, "eval")
  assert evaluated["preference_acc"] == 1 and evaluated["num_examples"] == 8
  model, talks = paxlike.load(folder, allow_modules=["my_preferences"]), []
  for said in (" please 7", " never 7", " please 123456"):
    talks.append([{"role": "user", "content": "say"}, {"role": "assistant", "content": said}])
  rewards = model.rewards(talks)
  assert rewards[0] > rewards[1]
  np.testing.assert_allclose(rewards, [model.rewards([talk])[0] for talk in talks], rtol=1e-4)
  with pytest.raises(UserError, match="conversation 1: expected a list of messages"):
    model.rewards([talks[0], "please"])
  with pytest.raises(UserError, match=r"conversation 0 has .* more than MAX_SEQ_LEN=48"):
    model.rewards([[*talks[0][:1], {"role": "assistant", "content": "say" * 20}]])
  with pytest.raises(UserError, match="by a reward model: train one with"):
    paxlike.load(base, allow_modules=["my_preferences"]).rewards(talks)
  capsys.readouterr()
  assert run(f"--job_log_dir={folder}", "--mode=decode", "--prompt=a", *CODE) == 2
  assert "predicts no tokens" in capsys.readouterr().err
  exported = ["--from=paxlike", f"--path={folder}", f"--to={tmp_path / 'out'}", *CODE]
  assert convert(exported) == 2
  assert "has a reward model, for which there is no export" in capsys.readouterr().err
