# SPDX-License-Identifier: Apache-2.0
import json

import jax
import numpy as np
import pytest
from models import SEQ_LEN, VOCAB, tiny
from program import curve, finish, run, start

from paxlike import train_state
from paxlike.data.dataset import RowDataset
from paxlike.evaluation import EvalSet, Evaluator
from paxlike.feed import Feed
from paxlike.layers.decoder import forward
from paxlike.mesh import MeshSpec


class Rows(RowDataset):
  """Thirteen rows: a multiple of no batch size."""

  seq_len = SEQ_LEN

  def fingerprint(self):
    return "thirteen"

  def num_rows(self, epoch):
    return 13

  def rows(self, epoch, numbers):
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (13, SEQ_LEN + 1)).astype(np.int32)[numbers]
    weights = random.random((13, SEQ_LEN)).astype(np.float32)[numbers]
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def reference(params):
  arrays = Rows().rows(0, np.arange(13))
  logits = np.asarray(forward(tiny(), params, arrays)[0], np.float64)
  log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  losses = -np.take_along_axis(log_probabilities, arrays["targets"][..., None], -1)[..., 0]
  weights = arrays["weights"]
  correct = logits.argmax(-1) == arrays["targets"]
  return {
    "log_pplx": (losses * weights).sum() / weights.sum(),
    "fraction_of_correct_next_step_preds": (correct * weights).sum() / weights.sum(),
    "num_predictions": weights.sum(),
  }


@pytest.mark.parametrize(("batch_size", "ici"), [(4, (1, 1, 1)), (13, (1, 1, 1)), (8, (4, 1, 2))])
def test_metrics_are_exact_for_any_batch_size_and_mesh(batch_size, ici):
  built = MeshSpec(ici=ici).build(jax.devices()[: int(np.prod(ici))])

  feed = Feed(built, batch_size=batch_size, seq_len=SEQ_LEN)
  with jax.set_mesh(built):
    params = train_state.init_params(tiny(), built, seed=1)
    evaluator = Evaluator(tiny(), EvalSet(dataset=Rows()), feed, batch_size=batch_size)
    got = evaluator.run(params)
  expected = reference(jax.device_get(params))
  assert got.keys() == expected.keys()
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
    assert f"evaluated validation after {step} updates" in capsys.readouterr().out
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
