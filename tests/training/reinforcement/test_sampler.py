# SPDX-License-Identifier: Apache-2.0
"""Sampled answers are those of the training forward pass, and so are their log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import SEQ_LEN, adamw, tiny

from paxlike.devices.batch_placement import BatchPlacer
from paxlike.devices.mesh import MeshSpec
from paxlike.inference.sampling import Sampling
from paxlike.training import train_state
from paxlike.training.forward_backward import ForwardBackward
from paxlike.training.objectives.policy import Outputs, token_scores
from paxlike.training.reinforcement.answers import Answer, pack
from paxlike.training.reinforcement.drafts import Drafter
from paxlike.training.reinforcement.sampler import Sampler

END = 5
SAMPLING = Sampling(temperature=1.5, top_k=40)
ADAMW = adamw(peak=1e-2)


def empty(count):
  rng = np.random.default_rng(0)
  sizes = rng.integers(1, 6, count)
  return [
    Answer(prompt=rng.integers(6, 90, size).astype(np.int32), max_tokens=8, seed=100 + n)
    for n, size in enumerate(sizes)
  ]


def sampler_of(definition, weights, passes, devices):
  drafter = Drafter(
    definition,
    weights,
    num_slots=3,
    seq_len=SEQ_LEN,
    end_ids=(END,),
    steps_per_call=8,
    sampling=SAMPLING,
    phase="sample",
  )
  drafter.load = lambda params: None  # Keeps its weights.
  placer = BatchPlacer(devices, batch_size=4, seq_len=SEQ_LEN)
  return Sampler(drafter, passes, placer, seq_len=SEQ_LEN)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_whatever_drafts_them_answers_are_those_of_the_forward_pass(dtype, shape):
  """Also if the drafter has other weights, or computes in another precision, on one device."""
  definition, exact = tiny(dtype=dtype), tiny(dtype=np.float32)
  devices = MeshSpec(ici=shape).build(jax.devices()[: int(np.prod(shape))])
  passes = ForwardBackward(definition, ADAMW, sampling=SAMPLING)
  with jax.set_mesh(devices):
    state = train_state.create(definition, ADAMW, devices, seed=0)
    prepared = passes.prepare(state)
    found = []
    for noise in (0.0, 0.02):
      drafter = {name: w + noise * jnp.cos(jnp.arange(w.size)).reshape(w.shape) for name, w in
                 state.weights.items()}  # fmt: skip
      sampler = sampler_of(exact, drafter, passes, devices)
      answers = empty(10)
      packed, _ = sampler.sample(prepared, answers)
      assert not sampler.unsettled
      found.append((answers, sampler.redrawn))
      again = [passes.forward(*prepared, sampler._placer.put(b)) for b in packed.batches]
      scores = packed.collect([np.asarray(r.scores.log_probabilities_BT) for r in again])
      for answer, of_answer in zip(answers, scores, strict=True):
        assert answer.log_probabilities.tobytes() == of_answer.tobytes()
        assert answer.has_ended == (answer.tokens[-1] == END)
        assert END not in answer.tokens[:-1]
        assert answer.has_ended or len(answer.tokens) == 8
  (drafts, _), (others, redrawn) = found
  assert redrawn > 0
  assert [answer.tokens for answer in drafts] == [answer.tokens for answer in others]
  assert len({tuple(answer.tokens) for answer in drafts}) == 10


@pytest.mark.slow
def test_what_does_not_settle_is_counted_and_has_its_own_log_probabilities(monkeypatch):
  monkeypatch.setattr("paxlike.training.reinforcement.sampler.MOST_ROUNDS", 1)
  definition = tiny()
  devices = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  passes = ForwardBackward(definition, ADAMW, sampling=SAMPLING)
  with jax.set_mesh(devices):
    state = train_state.create(definition, ADAMW, devices, seed=0)
    drafter = {name: 2 * w for name, w in state.weights.items()}
    sampler = sampler_of(definition, drafter, passes, devices)
    answers = empty(10)
    prepared = passes.prepare(state)
    packed, _ = sampler.sample(prepared, answers)
    again = [sampler.score(prepared, batch) for batch in packed.batches]
  assert sampler.unsettled > 0
  scores = packed.collect([np.asarray(r.scores.log_probabilities_BT) for r in again])
  for answer, of_answer in zip(answers, scores, strict=True):
    assert answer.log_probabilities.tobytes() == of_answer.tobytes()


@pytest.mark.slow
def test_two_programs_have_the_gradients_of_one():
  definition = tiny()
  devices = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  passes = ForwardBackward(definition, ADAMW, sampling=SAMPLING)
  answers = empty(6)
  for answer in answers:
    answer.tokens = [7, 8, 9, answer.record]
  (arrays,) = pack(answers, batch_size=4, seq_len=SEQ_LEN).batches
  batch = {name: jnp.array(array) for name, array in arrays.items()}
  factors_BT = jax.random.normal(jax.random.key(0), (4, SEQ_LEN))
  with jax.set_mesh(devices):
    state = train_state.create(definition, ADAMW, devices, seed=0)
    weights, constants = passes.prepare(state)
    result = passes.forward(weights, constants, batch)
    gradients = passes.backward(result, Outputs(factors_BT, None))

    def loss(params):
      scores, _ = token_scores(definition.bind(params), batch, None, SAMPLING)
      return (scores.log_probabilities_BT * factors_BT).sum()

    expected = jax.jit(jax.grad(loss))(weights.trained)
    norms = {name: float(jnp.abs(g).max()) for name, g in expected.items()}
    for name, g in gradients.trained.items():
      np.testing.assert_allclose(g, expected[name], rtol=1e-5, atol=1e-6 * norms[name])
    total = passes.accumulate(None, passes.backward(result, Outputs(factors_BT, None)))
    total = passes.accumulate(total, gradients)
    np.testing.assert_allclose(
      total.trained["embedding.table"], 2 * expected["embedding.table"], rtol=1e-5, atol=1e-6
    )
    step = int(state.step)
    state, metrics = passes.update(state, total, jnp.float32(1))
  assert int(state.step) == step + 1 and metrics["skipped"] == 0


def test_answers_are_packed_whole_and_found_again():
  answers = empty(12)
  for answer in answers:
    answer.tokens = list(range(answer.record % 5 + 1))
  packed = pack(answers, batch_size=2, seq_len=SEQ_LEN, max_segments=3)
  targets = packed.collect([batch["targets"] for batch in packed.batches])
  assert [list(of_answer) for of_answer in targets] == [answer.tokens for answer in answers]
  for batch in packed.batches:
    assert batch["segments"].max() <= 2
    for row in range(2):
      segments = batch["segments"][row]
      assert len(np.unique(batch["seeds"][row][segments > 0])) == segments.max()
  values = packed.spread([np.arange(len(answer.tokens)) for answer in answers])
  for answer, part in zip(answers, packed.collect(values), strict=True):
    assert list(part) == list(range(len(answer.tokens)))
  assert sum(array.sum() for array in values) == sum(
    sum(range(len(answer.tokens))) for answer in answers
  )
