# SPDX-License-Identifier: Apache-2.0
"""Sessions sample and train in parts, and other parts of paxlike read what they save."""

from typing import Any, cast

import numpy as np
import pytest

import paxlike
from paxlike.errors import UserError
from paxlike.experiments.sums import Sums, SumsRl

KNOBS = {"LEARNING_RATE": 0.01, "LR_WARMUP": 0, "NUM_LAYERS": 1, "PERCORE_BATCH_SIZE": 2}
TEXTS = [("12+34=", "46"), ("5+8=", "13"), ("70+2=", "72")]


@pytest.mark.slow
def test_it_learns_from_texts_then_from_rewards_and_goes_on_where_it_was_saved(tmp_path):
  with paxlike.Session(Sums, tmp_path / "run", **KNOBS) as session:
    examples = [session.answer(*text) for text in TEXTS]
    first = session.log_probabilities(examples)
    for _ in range(20):
      passes = session.forward_backward(examples, "cross_entropy")
      session.optim_step()
    total = sum(map(np.sum, passes.log_probabilities))
    np.testing.assert_allclose(passes.loss, -total / sum(map(len, first)), rtol=1e-5)
    assert passes.loss < -0.2 * sum(map(np.sum, first)) / sum(map(len, first))
    assert session.save() == session.step == 20
    with pytest.raises(UserError, match="is in use"), paxlike.Session(Sums, tmp_path / "run"):
      pass
    later = _reinforced(session)
  with paxlike.Session(Sums, tmp_path / "run", **KNOBS) as again:
    assert again.step == 20
    assert _reinforced(again) == later
  model = paxlike.load(tmp_path / "run", 20)
  assert [model.generate(prompt, max_new_tokens=2) for prompt, _ in TEXTS[:1]] == ["46"]
  with pytest.raises(UserError, match=r"are of a paxlike\.Session"):
    paxlike.train(Sums, tmp_path / "run", **KNOBS)
  paxlike.train(Sums, tmp_path / "trained", MAX_STEPS=1, EVAL_INTERVAL_STEPS=0, **KNOBS)
  with pytest.raises(UserError, match="are of a run, which a session would break"):
    paxlike.Session(Sums, tmp_path / "trained", **KNOBS)


def _reinforced(session):
  """Trains on rewards; returns what was sampled and its last log-probabilities."""
  seen = []
  for seed in range(2):
    groups = session.sample([prompt for prompt, _ in TEXTS], num_samples=4, max_new_tokens=3)
    answers = [answer for group in groups for answer in group]
    for answer in answers:
      answer.advantage = session.text(answer).count("7") - 0.5
    passes = session.forward_backward(answers, "policy")
    for answer, found in zip(answers, passes.log_probabilities, strict=True):
      assert found.tobytes() == answer.log_probabilities.tobytes()
    assert passes.metrics["clipped_fraction"] == 0
    session.optim_step()
    seen.append((seed, [answer.tokens for answer in answers], passes.loss))
  return seen


@pytest.mark.slow
def test_a_loss_may_be_any_function_and_gradients_add_up(tmp_path):
  def double(log_probabilities_BT, arrays):
    return -2 * (log_probabilities_BT * arrays["weights"]).sum(), {}

  norms: list[float] = []
  both: list[list[Any]] = [["cross_entropy", "cross_entropy"], [double]]
  for losses in both:
    with paxlike.Session(Sums, tmp_path / "run", **KNOBS) as session:
      examples = [session.answer(*text) for text in TEXTS]
      for loss in losses:
        session.forward_backward(examples, loss)
      norms.append(session.optim_step()["grad_norm"])
      with pytest.raises(UserError, match=r"a number and a dict .* result is \(\) in shapes"):
        session.forward_backward(examples, cast(Any, lambda scores_BT, arrays: scores_BT.sum()))
  np.testing.assert_allclose(*norms, rtol=1e-5)
  assert not (tmp_path / "run").exists()  # Nothing was saved.


@pytest.mark.slow
def test_a_loss_can_train_a_value_head(tmp_path):
  def loss(log_probabilities_BT, arrays):
    import jax.numpy as jnp

    del log_probabilities_BT
    errors_BT = jnp.square(arrays["values"] - arrays["returns"])
    return (errors_BT * arrays["weights"]).sum(), {}

  how = {**KNOBS, "ADVANTAGES": "gae", "PERCORE_BATCH_SIZE": 1, "LEARNING_RATE": 0.001}
  with paxlike.Session(SumsRl, tmp_path / "run", **how) as session:
    losses = []
    for seed in range(5):
      (answers,) = session.sample(["1+1="], max_new_tokens=3, num_samples=4, seed=seed)
      for answer in answers:
        answer.returns = np.ones(len(answer.tokens))
      losses.append(session.forward_backward(answers, "policy" if seed == 4 else loss).loss)
      session.optim_step()
    assert losses[0] == pytest.approx(1) and losses[3] < 0.9
    assert answer.values.shape == (len(answer.tokens),) and answer.values.any()


def test_what_it_cannot_do_is_said_in_a_line(tmp_path):
  with paxlike.Session(Sums, tmp_path / "run", **KNOBS) as session:
    with pytest.raises(UserError, match="call forward_backward before"):
      session.optim_step()
    with pytest.raises(UserError, match="expected cross_entropy, policy, or a function"):
      session.forward_backward([session.answer("1", "2")], cast(Any, "grpo"))
    with pytest.raises(UserError, match="more than MAX_SEQ_LEN=64"):
      session.sample(["1+1="], max_new_tokens=64)
    with pytest.raises(UserError, match="no answers"):
      session.forward_backward([], "policy")
    with pytest.raises(UserError, match="expected a list of prompts, not a single one"):
      session.sample("1+1=", max_new_tokens=3)
    with pytest.raises(UserError, match="a prompt: expected ids from 0 to 256"):
      session.sample([[49, 300]], max_new_tokens=3)
    with pytest.raises(UserError, match="an answer: expected ids from 0 to 256"):
      session.answer("1+1=", [300])
    for wrong in ({"max_new_tokens": 0}, {"num_samples": 0}, {"seed": -1}):
      with pytest.raises(UserError, match="expected at least"):
        session.sample(["1+1="], **{"max_new_tokens": 3, **wrong})
    answer = session.answer("1+1=", "2")
    with pytest.raises(UserError, match="sample returns one for each prompt"):
      session.forward_backward(cast(Any, [[answer]]), "policy")
    session.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer: read the answer's tokens"):
      session.text(answer)
  with pytest.raises(UserError, match="the session is closed"):
    session.save()
  with pytest.raises(UserError, match="num_slots=0: expected at least 1"):
    paxlike.Session(Sums, tmp_path / "run", num_slots=0)
  with pytest.raises(UserError, match="with LongRoPE, whose factors change beyond 4096 tokens"):
    paxlike.Session("Phi4Mini", tmp_path / "run")
  with pytest.raises(UserError, match="GRADIENT_ACCUMULATION_STEPS: not supported"):
    paxlike.Session(Sums, tmp_path / "run", GRADIENT_ACCUMULATION_STEPS=2)
