# SPDX-License-Identifier: Apache-2.0
"""A run with multi-token prediction: only its training uses the layers."""

import pytest

import paxlike
from paxlike import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny, text, tmp_path_factory):
  knobs = {"DATA_PATH": str(text), "MTP_NUM_LAYERS": 1, "EMA_HALF_LIVES": (2.0,)}
  return paxlike.train(tiny, tmp_path_factory.mktemp("mtp") / "run", **knobs)


def records(run, kind):
  return [record for record in run.records() if record["kind"] == kind]


def test_the_loss_is_logged_beside_that_of_the_next_token(run):
  for record in records(run, "train"):
    assert 0.5 < record["mtp_loss"] / record["loss"] < 2
  assert "mtp_loss" not in records(run, "eval")[-1]


def test_evaluation_decoding_and_logits_are_without_it(run):
  model = run.load()
  assert not [name for name in model._params if name.startswith("mtp.")]
  (values,) = model.evaluate().values()
  assert values["log_pplx"] == records(run, "eval")[-1]["log_pplx"]
  assert len(model.generate("3 b", max_new_tokens=4)) == 4
  assert model.logits([[1, 2]]).shape == (1, 2, 257)
  for flags in (("--mode=eval",), ("--mode=decode", "--prompt=3")):
    assert main.main(["", *flags, f"--job_log_dir={run.folder}"]) == 0


def test_training_goes_on_and_starts_another_run(run, tiny, text, tmp_path):
  given = {"DATA_PATH": str(text), "MAX_STEPS": 5, "EMA_HALF_LIVES": (2.0,)}
  with pytest.raises(paxlike.UserError, match=r"mtp\.layers\.0.*only in the checkpoint"):
    paxlike.train(tiny, run.folder, **given, MTP_NUM_LAYERS=0)
  paxlike.train(tiny, run.folder, **given, MTP_NUM_LAYERS=1, MTP_LOSS_SCALING_FACTOR=0.3)
  given = {"DATA_PATH": str(text), "CHECKPOINT_RESTORE_PATH": str(run.folder), "MAX_STEPS": 1}
  paxlike.train(tiny, tmp_path / "without", **given)
  lora = {**given, "USE_LORA": True, "MTP_NUM_LAYERS": 1}
  with pytest.raises(paxlike.UserError, match=r"MTP_NUM_LAYERS: mtp\.layers\.0\.\S+ is neither"):
    paxlike.train(tiny, tmp_path / "adapters", **lora, CHECKPOINT_IGNORE_RULES=("mtp", "lora"))
  with pytest.raises(paxlike.UserError, match=r"mtp\.layers.*CHECKPOINT_IGNORE_RULES"):
    paxlike.train(tiny, tmp_path / "other", **given, MTP_NUM_LAYERS=1, MTP_KIND="parallel")
