# SPDX-License-Identifier: Apache-2.0
"""Rewards that a trained model gives."""

import json
import shutil

import jax
import numpy as np
import pytest
from helpers.program import records as train_records

import paxlike
from paxlike.config import building, graph_file
from paxlike.devices.mesh import MeshSpec
from paxlike.planning import model_sizes
from paxlike.training.reinforcement.model_reward import AnswerScorer, ModelReward


def on_one_device(judge):
  """Returns a scorer on one device, and its mesh."""
  devices = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  model = ModelReward(path=str(judge))
  return AnswerScorer(model, devices, batch_size=1, compiler_options={}), devices


@pytest.fixture
def scored(judge, monkeypatch):
  """Checks that the reward model of a run has scored as on one device, and as in Python."""
  monkeypatch.syspath_prepend(str(judge.parent))
  found, score = [], AnswerScorer.__call__

  def recorded(self, conversations):
    scores = score(self, conversations)
    found.extend(zip([messages for messages, _ in conversations], *scores, strict=True))
    return scores

  monkeypatch.setattr(AnswerScorer, "__call__", recorded)

  def compare():
    talks, rewards, were_cut = zip(*found, strict=True)
    assert len(set(rewards)) > 10 and not any(were_cut)
    in_python = paxlike.load(judge, allow_modules=["judge_task"]).rewards(talks)
    np.testing.assert_allclose(rewards, in_python, rtol=1e-5, atol=1e-6)
    scorer, devices = on_one_device(judge)
    with jax.set_mesh(devices):
      alone = [score(scorer, [(talk, {})])[0][0] for talk in talks]  # In a batch of its own.
    np.testing.assert_allclose(rewards, alone, rtol=1e-5, atol=1e-6)

  return compare


@pytest.mark.slow
def test_a_reward_model_scores_on_any_mesh_as_it_does_alone(
  letters, judge, scored, tmp_path, capsys
):
  more = ("--fdl.REWARD=none", f"--fdl.REWARD_MODEL={judge}", "--fdl.MAX_PROMPTS_PER_STEP=3")
  more += (f"--fdl.EVAL_DATA_PATH={tmp_path / 'prompts.jsonl'}", "--fdl.MAX_STEPS=2")
  assert letters("run", *more, "--fdl.ICI_MESH_SHAPE=[2,2,2]") == 0
  scored()
  for record in train_records(tmp_path / "run"):
    assert record["reward"] == pytest.approx(record["reward/reward_model"], rel=1e-6) != 0
    assert record["reward_model_cut_fraction"] == 0
  result = json.loads(next((tmp_path / "run" / "eval_out").rglob("*2.json")).read_text())
  assert result["num_examples"] == 5 and result["reward"] != 0
  made = building.build(graph_file.read(tmp_path / "run" / "config.json"))
  given = {"seq_len": 24, "beside": made.models_beside}
  sizes = model_sizes.of_definition(made.definition, made.optimizer, **given)
  assert sum(one.size for one in sizes.beside) == made.rollouts.reward_model.definition.num_params

  shutil.copytree(judge, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
  shutil.copytree(judge, tmp_path / "damaged")
  for file in (tmp_path / "damaged" / "checkpoints").rglob("*"):
    if file.is_file() and (size := file.stat().st_size) > 10_000:
      file.write_bytes(file.read_bytes()[: size // 2] + bytes(size - size // 2))
  for to, folder, flags, message in (
    ("new", tmp_path / "no", (), "has no config.json: give the folder of a run of a reward model"),
    ("new", tmp_path / "run", (), "is a Decoder, not a reward model"),
    ("new", tmp_path / "empty", (), "no checkpoint"),
    ("new", tmp_path / "damaged", (), "is damaged"),
    ("new", judge, ("--fdl.REWARD_MODEL_STEP=1",), "no checkpoint 1 in"),
    ("new", judge, ("--fdl.MAX_NEW_TOKENS=153", "--fdl.MAX_SEQ_LEN=170"), "MAX_SEQ_LEN=160"),
    ("run", judge, ("--fdl.REWARD_MODEL_STEP=2",), "is not the reward model of the steps so far"),
  ):
    capsys.readouterr()
    given = (f"--fdl.REWARD_MODEL={folder}", "--fdl.MAX_STEPS=3", *flags)
    assert letters(to, *more, *given) == 2
    error = capsys.readouterr().err
    assert f"REWARD_MODEL={folder}" in error and message in error and "Traceback" not in error
  assert not (tmp_path / "new" / "checkpoints").exists()


@pytest.mark.slow
def test_of_a_conversation_that_is_too_long_the_beginning_is_scored(judge):
  scorer, devices = on_one_device(judge)
  asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 200}
  with jax.set_mesh(devices):
    (long, short), cut = scorer([([asked, said], {}), ([asked, said | {"content": "b"}], {})])
    assert cut == [True, False] and long != short
    # What is cut off does not count.
    assert scorer([([asked, said | {"content": "b" * 300}], {})]) == ([long], [True])
