# SPDX-License-Identifier: Apache-2.0
import json
import math
import signal

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.program import curve, finish, run, start
from helpers.rows import Rows
from helpers.tiny_model import SEQ_LEN, VOCAB, tiny

from paxlike import registry
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.data.corpus import Corpus
from paxlike.data.examples import ExampleRows
from paxlike.data.seqio import tfds_writer
from paxlike.data.seqio.tfds_writer import Schema
from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizers.tokenizer import ByteTokenizer
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.decoder import forward
from paxlike.processes import phases
from paxlike.training import evaluation, train_state
from paxlike.training.evaluation import EvalSet, Evaluator


def losses_of(params):
  """Returns the sequences, and the loss of each target."""
  arrays = Rows().rows(0, np.arange(13))
  logits = np.asarray(forward(tiny(), params, arrays)[0], np.float64)
  log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  losses = -np.take_along_axis(log_probabilities, arrays["targets"][..., None], -1)[..., 0]
  return arrays | {"correct": logits.argmax(-1) == arrays["targets"]}, losses


def reference(params):
  arrays, losses = losses_of(params)
  weights, correct = arrays["weights"], arrays["correct"]
  return {
    "log_pplx": (losses * weights).sum() / weights.sum(),
    "fraction_of_correct_next_step_preds": (correct * weights).sum() / weights.sum(),
    "num_predictions": weights.sum(),
  }


def test_the_names_of_metrics_are_known_whatever_they_read():
  def of_all(scores, batch):
    read = ("inputs", "targets", "alternatives", "segments", "positions", "weights")
    total = sum(batch[name].sum(-1) for name in read) + scores.loss_BT.sum(-1)
    return {"of_all": (total, total)}

  one = EvalSet(dataset=Rows(), metrics=(of_all, evaluation.language_model))
  assert set(one.names) == {"of_all", "log_pplx", "fraction_of_correct_next_step_preds"}


class OfText(Rows):
  """The same sequences, of a tokenizer."""

  def __init__(self, tokenizer):
    self._tokenizer = tokenizer

  @property
  def tokenizer(self):
    return self._tokenizer


class Ending(ByteTokenizer):
  """Ids of one to three bytes, and two that stand for no text."""

  def byte_lengths(self):
    return np.array([0, *(1 + i % 3 for i in range(VOCAB - 2))], np.int32)  # One id is beyond.


def test_bits_per_byte_are_those_counted_by_hand():
  built = MeshSpec(ici=(4, 1, 2)).build(jax.devices()[:8])
  placer = BatchPlacer(built, batch_size=8, seq_len=SEQ_LEN)
  found = []
  with jax.set_mesh(built):
    params = train_state.init_params(tiny(), built, seed=1)
    for tokenizer in (ByteTokenizer(), Ending()):
      one = EvalSet(dataset=OfText(tokenizer))
      assert "bits_per_byte" in one.names
      found.append(Evaluator(tiny(), one, placer, batch_size=8).run(params).values)
  of_bytes, of_others = found
  assert of_bytes["bits_per_byte"] == pytest.approx(of_bytes["log_pplx"] / math.log(2), rel=1e-6)
  arrays, losses = losses_of(jax.device_get(params))
  lengths = np.append(Ending().byte_lengths(), 0)[arrays["targets"]]
  nats = (losses * arrays["weights"] * (lengths > 0)).sum()
  expected = nats / math.log(2) / (lengths * arrays["weights"]).sum()
  assert of_others["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
  assert of_others["bits_per_byte_stderr"] > 0


@pytest.mark.parametrize(("batch_size", "ici"), [(4, (1, 1, 1)), (13, (1, 1, 1)), (8, (4, 1, 2))])
def test_metrics_are_exact_for_any_batch_size_and_mesh(batch_size, ici):
  built = MeshSpec(ici=ici).build(jax.devices()[: int(np.prod(ici))])

  placer = BatchPlacer(built, batch_size=batch_size, seq_len=SEQ_LEN)
  with jax.set_mesh(built):
    params = train_state.init_params(tiny(), built, seed=1)
    evaluator = Evaluator(tiny(), EvalSet(dataset=Rows()), placer, batch_size=batch_size)
    got = evaluator.run(params).values
  expected = reference(jax.device_get(params))
  for name, value in expected.items():
    assert got[name] == pytest.approx(value, rel=1e-5), name


@pytest.fixture
def flags(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text("how much wood would a woodchuck chuck " * 200)
  return (
    "--fdl_config=ShakespeareChar",
    f"--fdl.DATA_PATH={path}",
    f"--job_log_dir={tmp_path / 'run'}",
    "--fdl.NUM_LAYERS=1",
    "--fdl.MODEL_DIMS=16",
    "--fdl.PERCORE_BATCH_SIZE=1",
    "--fdl.EVAL_INTERVAL_STEPS=2",
    "--fdl.CHECKPOINT_EVERY_N_STEPS=2",
    "--fdl.MAX_STEPS=4",
  )


@pytest.mark.slow
def test_evaluation_of_a_checkpoint_equals_that_in_training(flags, tmp_path, capsys):
  assert run(*flags) == 0
  folder = tmp_path / "run"
  during = dict(curve(folder, "eval"))
  out = folder / "eval_out" / "validation"
  for step, more in [(4, ()), (2, ("--step=2",))]:
    (out / f"eval_{step:08d}.json").unlink()
    capsys.readouterr()
    assert run(*flags, "--mode=eval", *more) == 0
    told = capsys.readouterr().out
    assert told.startswith("attention: flash_cpu\n")
    assert f"evaluated validation after {step} updates" in told
    result = json.loads((out / f"eval_{step:08d}.json").read_text())
    assert result["log_pplx"] == pytest.approx(during[step], rel=1e-6)
  assert run(*flags, "--mode=eval", "--step=3") == 2
  assert "no checkpoint 3" in capsys.readouterr().err
  assert dict(curve(folder, "eval")) == during


@pytest.mark.slow
def test_continuous_evaluation_follows_a_job_and_ends_with_it(flags, tmp_path):
  steps = ("--fdl.MAX_STEPS=1500", "--fdl.CHECKPOINT_EVERY_N_STEPS=500")
  steps += ("--fdl.EVAL_INTERVAL_STEPS=0",)
  job = start(*flags, *steps)
  status_file = tmp_path / "run" / "status.json"
  while job.poll() is None and not status_file.exists():
    pass
  follower = start(*flags, *steps, "--mode=eval", "--continuous")
  status, _, err = finish(job)
  assert status == 0, err
  status, out, err = finish(follower)
  assert status == 0, err
  assert "after 1500 updates" in out
  assert out.rstrip().endswith("the job has ended")


@pytest.mark.slow
def test_a_stop_ends_an_evaluation_after_its_batch(flags, tmp_path, monkeypatch):
  enter, batches = phases.enter, []

  def entering(kind, of="", **how):
    enter(kind, of, **how)
    if kind == "eval":
      batches.append(of)
      signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(phases, "enter", entering)
  assert run(*flags, "--fdl.EVAL_INTERVAL_STEPS=1") == 143
  assert batches == ["validation, batch 0"] * 2  # Before it is read, and while it is computed.
  assert not (tmp_path / "run" / "eval_out").exists()
  assert Checkpoints(tmp_path / "run" / "checkpoints", keep=None).steps() == [1]
  assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"


def likelihoods(logits, ids):
  normal = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  return np.take_along_axis(normal, ids[..., None], -1)[..., 0]


def test_answers_are_judged_as_their_definitions_say():
  random = np.random.default_rng(0)
  logits = random.normal(size=(200, 5, 6)).astype(np.float32)
  targets, alternatives = random.integers(0, 6, (2, 200, 5)).astype(np.int32)
  weights = (random.random((200, 5)) < 0.3).astype(np.float32)
  weights[:3] = 0  # Rows that only fill up.
  batch = {"targets": targets, "weights": weights, "alternatives": alternatives}
  scores = evaluation.score(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(alternatives))
  strict, weight_B = evaluation.acc_strict(scores, jax.tree.map(jnp.asarray, batch))["acc_strict"]
  boolq, _ = evaluation.boolq_acc(scores, jax.tree.map(jnp.asarray, batch))["boolq_acc"]
  better = likelihoods(logits, targets) > likelihoods(logits, alternatives)
  for row in range(200):
    places = np.flatnonzero(weights[row])
    assert weight_B[row] == (len(places) > 0)
    if len(places):
      assert strict[row] == all(logits[row, p].argmax() == targets[row, p] for p in places)
      assert boolq[row] == all(better[row, p] for p in places)
    else:
      assert strict[row] == boolq[row] == 0
  assert 0 < strict.sum() < 197 and 0 < boolq.sum() < 197


def test_standard_errors_are_those_of_samples():
  one_B = np.ones(50)
  right_B = (np.arange(50) % 3 == 0).astype(float)
  lengths_B = 1.0 + np.arange(50) % 5
  sums = {"acc": (right_B, one_B), "loss": (right_B * lengths_B, lengths_B)}
  sums["num_predictions"] = (lengths_B, lengths_B)
  values = evaluation.result(sums, np.arange(50)).values
  assert values["acc"] == right_B.mean()
  assert values["acc_stderr"] == pytest.approx(right_B.std(ddof=1) / np.sqrt(50))
  # The jackknife, for a quotient of sums.
  without = [
    (right_B * lengths_B).sum() - right_B[i] * lengths_B[i] for i in range(50)
  ] / (lengths_B.sum() - lengths_B)  # fmt: skip
  jackknife = np.sqrt(49 / 50 * ((without - without.mean()) ** 2).sum())
  assert values["loss_stderr"] == pytest.approx(jackknife, rel=0.05)


class Packable(Corpus):
  """Examples whose later half counts."""

  def index(self):
    random = np.random.default_rng(1)
    lengths = random.integers(2, SEQ_LEN, 40)
    offsets = np.append(0, np.cumsum(lengths))
    tokens = random.integers(0, VOCAB, offsets[-1]).astype(np.uint16)
    weights = np.concatenate([np.arange(n) >= n // 2 for n in lengths]).astype(np.uint8)
    return TokenIndex(tokens, offsets, {"weights": weights})


def test_packed_examples_have_the_loss_of_separate_ones():
  built = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  placer = BatchPlacer(built, batch_size=4, seq_len=SEQ_LEN)
  found = {}
  with jax.set_mesh(built):
    params = train_state.init_params(tiny(), built, seed=1)
    for packed in (False, True):
      rows = ExampleRows(corpus=Packable(), seq_len=SEQ_LEN, packed=packed)
      evaluator = Evaluator(tiny(), EvalSet(dataset=rows), placer, batch_size=4)
      found[packed] = evaluator.run(params).values
  assert found[True]["num_examples"] < found[False]["num_examples"] == 40
  for name in ("log_pplx", "num_predictions", "fraction_of_correct_next_step_preds"):
    assert found[True][name] == pytest.approx(found[False][name], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(("says", "share"), [("the answer", 1.0), ("nothing", 0.0)])
def test_lambada_of_one_who_knows_and_of_one_who_does_not(
  shared_data, tmp_path, monkeypatch, says, share
):
  def known(definition, params, batch):
    sure = jax.nn.one_hot(batch["targets"], 512) * (50 if says == "the answer" else 0)
    return evaluation.score(sure, batch["targets"], None)

  monkeypatch.setattr(evaluation, "scores_of", known)
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  text = {"text": (("text",), str)}
  schema = Schema(name="my_lambada:1.0.0", splits=("test",), fields=text)
  tfds_writer.write(schema, [shared_data / "lambada_test.jsonl"], tmp_path)
  experiment = registry.find("Lambada126M")()
  experiment.set("VOCAB_PATH", str(shared_data / "stories260K" / "tokenizer.model"), source="test")
  experiment.set("VOCAB_SIZE", "512", source="test")
  eval_set = fdl.build(experiment.eval_data()["lambada"])
  built = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  with jax.set_mesh(built):
    placer = BatchPlacer(built, batch_size=64, seq_len=2048)
    result = Evaluator(tiny(), eval_set, placer, batch_size=64).run({})
  assert result.values["acc_strict"] == share
  assert result.values["num_examples"] == len(result.records) == 5153
  assert [record["example"] for record in result.records] == list(range(5153))
  if share == 0.0:
    assert result.values["log_pplx"] == pytest.approx(np.log(512), rel=1e-6)
