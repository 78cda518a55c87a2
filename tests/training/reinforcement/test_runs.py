# SPDX-License-Identifier: Apache-2.0
"""Runs of reinforcement learning: they learn, resume exactly, and refuse what they cannot do."""

import json
import shutil
import socket

import numpy as np
import pytest
from helpers.program import finish, run, start
from helpers.program import records as train_records

from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.convert.main import run as convert
from paxlike.convert.safetensors_files import TensorFolder
from paxlike.training.reinforcement.policy_training import PolicyTraining

PPO = ("--fdl.ADVANTAGES=gae",)


def final_state(folder, step):
  import orbax.checkpoint as ocp

  with Checkpoints(folder / "checkpoints", keep=None) as saved, ocp.StandardCheckpointer() as io:
    return io.restore(saved.path(step) / "state")


@pytest.mark.slow
def test_it_learns_and_the_sampled_log_probabilities_are_those_of_training(
  letters, tmp_path, capsys
):
  more = (f"--fdl.EVAL_DATA_PATH={tmp_path / 'prompts.jsonl'}", "--fdl.MAX_STEPS=40")
  assert letters("run", *more, "--fdl.ICI_MESH_SHAPE=[2,2,2]") == 0
  records = train_records(tmp_path / "run")
  assert np.mean([one["reward"] for one in records[-5:]]) > 0.5
  assert records[0]["reward"] < 0.2
  assert all(one["log_probability_gap"] == 0 for one in records)
  assert 0 < max(one["draft_gap"] for one in records) < 1e-5
  of_parts = [one["reward/small"] + one["reward/wanted"] for one in records]
  np.testing.assert_allclose(of_parts, [one["reward"] for one in records], rtol=1e-5)
  out = capsys.readouterr().out
  assert "answers:    2 prompts x 8 answers of up to 6 tokens in each step" in out
  result = json.loads(next((tmp_path / "run" / "eval_out").rglob("*40.json")).read_text())
  assert result["reward"] > 0.5 and result["num_examples"] == 5


@pytest.mark.slow
def test_what_a_folder_names_as_the_reward_is_not_called(letters, tmp_path, capsys):
  assert letters("run", "--fdl.MAX_STEPS=1", "--fdl.REWARD=exact_answer") == 0
  for name in ("config.json", "experiment.json"):
    file = tmp_path / "run" / name
    file.write_text(file.read_text().replace("exact_answer", "builtins.exec"))
  given = (f"--job_log_dir={tmp_path / 'run'}", "--fdl_allow_modules=letters_task")
  assert run("--mode=eval", *given, "--fdl.EVAL_PROMPTS=3") == 2
  assert "REWARD=builtins.exec is named by a file of the run" in capsys.readouterr().err


@pytest.mark.slow
def test_epochs_are_of_prompts(letters, tmp_path):
  assert letters("run", "--fdl.NUM_EPOCHS=1") == 0
  assert len(train_records(tmp_path / "run")) == 3  # Of 5 prompts, two in each step.


@pytest.mark.slow
def test_prompts_of_which_nothing_is_learned_are_replaced(letters, tmp_path, monkeypatch):
  (tmp_path / "picky_reward.py").write_text(
    "def picky(answer, record):\n  return len(answer) * (record['answer'] in 'bd')\n"
  )
  trained, rollout = [], PolicyTraining._rollout

  def recorded(self, *args):
    found = rollout(self, *args)
    trained.append([self._data.record(answer.record)["answer"] for answer in found[0]])
    return found

  monkeypatch.setattr(PolicyTraining, "_rollout", recorded)
  more = ("--fdl.REWARD=picky_reward.picky", "--fdl.MAX_PROMPTS_PER_STEP=5")
  assert letters("run", *more, "--fdl.MAX_STEPS=2") == 0
  assert [sorted(one) for one in trained] == [["b"] * 8 + ["d"] * 8] * 2
  for record in train_records(tmp_path / "run"):
    assert record["log_probability_gap"] == 0
    assert 2 <= record["prompts_tried"] <= 5
    share = (record["prompts_tried"] - 2) / record["prompts_tried"]
    np.testing.assert_allclose(record["equal_groups_fraction"], share, rtol=1e-6)


# Metrics of time and memory.
TIMED = ("time", "second", "flops", "memory", "bytes")


@pytest.mark.slow
@pytest.mark.parametrize(
  "more",
  [
    ("--fdl.ADVANTAGES=rloo", "--fdl.LOSS_PER=answer", "--fdl.MAX_PROMPTS_PER_STEP=3"),
    (*PPO, "--fdl.VALUE_CLIP=0.1", "--fdl.ROLLOUTS_BEHIND=1", "--fdl.IMPORTANCE_CAP=1.5"),
  ],
)
def test_resuming_is_exact(letters, judge, tmp_path, capsys, more):
  more += ("--fdl.KL_BETA=0.1", "--fdl.UPDATES_PER_STEP=2")
  shutil.copytree(judge, tmp_path / "judge")
  newest, later = tmp_path / "judge/checkpoints/checkpoint_00000003", tmp_path / "later"
  newest.rename(later)
  if "--fdl.ROLLOUTS_BEHIND=1" in more:
    more += (f"--fdl.REWARD_MODEL={tmp_path / 'judge'}",)
  assert letters("whole", *more) == 0
  for steps in (2, 6):
    assert letters("parts", *more, f"--fdl.num_steps={steps}") == 0
    if later.exists():  # The run of the reward model goes on meanwhile.
      later.rename(newest)
  whole, parts = (
    [
      {n: x for n, x in one.items() if not any(t in n for t in TIMED)}
      for one in train_records(folder)
    ]
    for folder in (tmp_path / "whole", tmp_path / "parts")
  )
  assert parts == whole
  if "--fdl.ROLLOUTS_BEHIND=1" in more:
    capsys.readouterr()
    assert letters("parts", *more, "--fdl.num_steps=8", "--fdl.GROUP_SIZE=2") == 2
    assert "GROUP_SIZE=2, but the checkpoint has answers" in capsys.readouterr().err
  expected, got = (final_state(tmp_path / name, 6) for name in ("whole", "parts"))
  assert expected.keys() == got.keys()
  for name, value in expected.items():
    assert np.asarray(value).tobytes() == np.asarray(got[name]).tobytes(), name


@pytest.mark.slow
def test_a_value_head_is_trained_beside_adapters_and_used_by_nothing_else(
  letters, tmp_path, capsys
):
  short = (*PPO, "--fdl.MAX_STEPS=2", f"--fdl.EVAL_DATA_PATH={tmp_path / 'prompts.jsonl'}")
  restored = f"--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / 'base'}"
  tuned = (*short, restored, "--fdl.USE_LORA=True", "--fdl.KL_BETA=0.1")
  assert letters("base", *short) == 0
  assert letters("tuned", *tuned) == 0
  first, last = train_records(tmp_path / "tuned")
  assert first["reference_kl"] == 0 != last["reference_kl"]  # The reference is the base.
  assert first["log_probability_gap"] == last["log_probability_gap"] == 0
  weights = final_state(tmp_path / "tuned", 2)
  trained = {name for name in weights if name.startswith("params.") and ".lora." not in name}
  assert trained == {"params.value_head.w"}
  assert np.abs(weights["params.value_head.w"]).max() > 0
  assert letters("base", *short, "--mode=eval") == 0
  assert letters("tuned", *tuned, "--mode=decode", "--prompt=say a", "--max_new_tokens=2") == 0
  assert letters("grpo", "--fdl.MAX_STEPS=1", restored) == 0
  capsys.readouterr()
  for name in ("base", "tuned"):
    folder = tmp_path / f"{name}_hf"
    given = ("--from=paxlike", f"--path={tmp_path / name}", f"--to={folder}")
    assert convert([*given, "--fdl_allow_modules=letters_task"]) == 0
    assert "the value head is left out: only training uses it" in capsys.readouterr().out
    assert not any("value" in tensor for tensor in TensorFolder(folder).specs)


@pytest.mark.slow
@pytest.mark.parametrize(
  "flags, message",
  [
    (("--fdl.REWARD=none",), "REWARD is not set: it is MODULE.FUNCTION"),
    (("--fdl.REWARD=letters_reward.no",), "REWARD=letters_reward.no cannot be imported"),
    (("--fdl.MAX_NEW_TOKENS=20",), "MAX_NEW_TOKENS=20 exceed MAX_SEQ_LEN=24"),
    (("--fdl.GROUP_SIZE=1",), "GROUP_SIZE=1: advantages compare"),
    (("--fdl.KL_IN=reward", "--fdl.KL_BETA=0.1"), "KL_IN=reward gives each token a reward"),
    (("--fdl.VALUE_CLIP=0.2",), "VALUE_CLIP has no effect"),
    ((*PPO, "--fdl.model.value_head=None"), "need each other: set ADVANTAGES=gae"),
    ((*PPO, "--fdl.GROUP_SIZE=1", "--fdl.MAX_PROMPTS_PER_STEP=3"), "as with GROUP_SIZE=1 all do"),
    ((*PPO, "--fdl.GAE_LAMBDA=1.5"), "GAE_LAMBDA"),
    (("--fdl.MAX_PROMPTS_PER_STEP=1",), "MAX_PROMPTS_PER_STEP=1 is less than PROMPTS_PER_STEP=2"),
    (("--fdl.MAX_PROMPTS_PER_STEP=3", "--fdl.ROLLOUTS_BEHIND=1"), "does not wait: leave one"),
    (("--fdl.ROLLOUTS_BEHIND=1", "--fdl.PROMPTS_PER_STEP=999999"), "too many for a checkpoint"),
    (("--fdl.GRADIENT_ACCUMULATION_STEPS=2",), "GRADIENT_ACCUMULATION_STEPS: not supported"),
    (("--fdl.PROMPT_FIELD=question",), "no prompt, a text or messages, in the field question"),
    (("--fdl.MAX_PROMPT_TOKENS=3",), "each of its 5 prompts has more than 3 tokens"),
    (("--fdl.CHAT_TEMPLATE=chatml",), "would end with the text '<|im_end|>'"),
    (("--fdl.DATA_PATH=no.jsonl",), "DATA_PATH"),
    (("--fdl.LABEL_SMOOTHING=0.1",), "Z_LOSS and LABEL_SMOOTHING: not supported"),
    (("--fdl.objective.sampling.top_k=5",), "sampling with top_k"),
    (("--mode=profile",), "--mode=profile has no step for reinforcement learning"),
    (("--mode=transfer", "--widths=32,64"), "--mode=transfer has no step"),
  ],
)
def test_what_cannot_be_trained_is_said_in_a_line(letters, tmp_path, capsys, flags, message):
  assert letters("run", *flags) == 2
  error = capsys.readouterr().err
  assert message in error and "Traceback" not in error
  assert not (tmp_path / "run" / "checkpoints").exists()


UNSURE = """
import os, pathlib, time

def unsure(answer, record):
  if os.path.exists("fail"):
    raise ValueError(f"no reward for {record['answer']}")
  try:
    pathlib.Path("slept").mkdir()  # In one of the processes.
    time.sleep(60)
  except FileExistsError:
    return os.urandom(1)[0]
"""


def job(folder, *more, count):
  """Runs the experiment on two devices of one or two processes; returns the status and errors."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  together = (f"--server_addr=localhost:{port}", f"--num_hosts={count}")
  flags = ("--fdl_config=letters_task.Letters", "--fdl.DATA_PATH=prompts.jsonl", *more)
  processes = [
    start(
      *(*flags, f"--num_cpu_devices={2 // count}", f"--job_log_dir={folder}"),
      *((*together, f"--host_idx={index}") if count > 1 else ()),
      cwd=folder.parent,
    )
    for index in range(count)
  ]
  return [(status, err) for status, _, err in map(finish, processes)]


@pytest.mark.slow
@pytest.mark.usefixtures("letters")
def test_two_processes_take_the_steps_of_one_and_resume(judge, tmp_path):
  evaluated = ("--fdl.EVAL_DATA_PATH=prompts.jsonl", "--fdl.MAX_PROMPTS_PER_STEP=3")
  evaluated += (f"--fdl.REWARD_MODEL={judge}",)
  flags = ("--fdl.ICI_MESH_SHAPE=[1,2,1]", *evaluated)
  assert job(tmp_path / "one", *flags, "--fdl.num_steps=4", count=1)[0][0] == 0
  flags = ("--fdl.ICI_MESH_SHAPE=[1,1,1]", "--fdl.DCN_MESH_SHAPE=[1,2,1]", *evaluated)
  for steps in (2, 4):
    for status, err in job(tmp_path / "two", *flags, f"--fdl.num_steps={steps}", count=2):
      assert status == 0, err
  one, two = (train_records(tmp_path / name) for name in ("one", "two"))
  assert len(one) == len(two) == 4
  for mine, other in zip(two, one, strict=True):
    for name in ("loss", "grad_norm", "reward", "entropy", "answer_tokens", "reward/reward_model"):
      np.testing.assert_allclose(mine[name], other[name], rtol=1e-5, atol=1e-7)
    assert mine["log_probability_gap"] == 0
  found = [
    json.loads(next((tmp_path / name / "eval_out").rglob("*4.json")).read_text())["reward"]
    for name in ("one", "two")
  ]
  assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("letters")
def test_processes_agree_on_random_rewards_and_time_outs_and_end_on_the_same_error(tmp_path):
  (tmp_path / "unsure_reward.py").write_text(UNSURE)
  flags = ("--fdl.ICI_MESH_SHAPE=[1,1,1]", "--fdl.DCN_MESH_SHAPE=[2,1,1]")
  flags += ("--fdl.REWARD=unsure_reward.unsure", "--fdl.REWARD_SECONDS=1")
  flags += ("--fdl.CHECK_REPLICAS_EVERY=1", "--fdl.ROLLOUTS_BEHIND=1")
  for status, err in job(tmp_path / "run", *flags, "--fdl.num_steps=2", count=2):
    assert status == 0, err
  assert [one["reward_timeouts"] for one in train_records(tmp_path / "run")] == [1, 0]
  (tmp_path / "fail").touch()
  for status, err in job(tmp_path / "run", *flags, "--fdl.num_steps=4", count=2):
    assert status == 2, err
    assert "paxlike: the reward unsure_reward.unsure: " in err and "no reward for" in err
    assert "Traceback" not in err
  assert Checkpoints(tmp_path / "run" / "checkpoints", keep=None).steps() == [2]
