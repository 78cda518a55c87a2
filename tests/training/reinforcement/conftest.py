# SPDX-License-Identifier: Apache-2.0
"""A task of letters, and the run of a reward model for it."""

import json

import pytest
from helpers.program import run

TASK = """
from paxlike.experiments.datasets import RewardPairs
from paxlike.experiments.llama import Llama
from paxlike.experiments.reinforcement import PromptFiles

class Tiny(Llama):
  VOCAB_SIZE = 257
  NUM_LAYERS = 1
  MODEL_DIMS = 32
  HIDDEN_DIMS = 64
  NUM_HEADS = 2
  NUM_KV_HEADS = 2
  FPROP_DTYPE = "float32"
  PERCORE_BATCH_SIZE = 2
  LEARNING_RATE = 0.02
  LR_SCHEDULE = "constant"
  SUMMARY_INTERVAL_STEPS = 1
  EVAL_INTERVAL_STEPS = 0

class Judge(RewardPairs, Tiny):
  MAX_SEQ_LEN = 160
  MODEL_DIMS = 48
  CHAT_TEMPLATE = "chatml"
  TRAIN_SHARE = 1.0
  EMA_HALF_LIVES = (2.0,)
  CHECKPOINT_EVERY_N_STEPS = 2
  MAX_STEPS = 3

class Letters(PromptFiles, Tiny):
  MAX_SEQ_LEN = 24
  REWARD = "letters_reward.letters"
  REWARD_WORKERS = 2
  PROMPTS_PER_STEP = 2
  GROUP_SIZE = 8
  MAX_PROMPT_TOKENS = 8
  MAX_NEW_TOKENS = 6
  MAX_STEPS = 6
"""
REWARD = """
def letters(answer, record):
  small = sum(one.islower() for one in answer) / 6
  return {"small": small, "wanted": answer.count(record["answer"]) / 6}
"""


@pytest.fixture
def letters(tmp_path, monkeypatch):
  """Runs the experiment above; its files are in `tmp_path`."""
  (tmp_path / "letters_task.py").write_text(TASK)
  (tmp_path / "letters_reward.py").write_text(REWARD)
  monkeypatch.syspath_prepend(str(tmp_path))
  data = tmp_path / "prompts.jsonl"
  records = [{"prompt": f"say {one}: ", "answer": one} for one in "abcde"]
  data.write_text("".join(f"{json.dumps(one)}\n" for one in records))

  def go(folder, *more):
    own = ("--fdl_config=letters_task.Letters", f"--fdl.DATA_PATH={data}")
    return run(*own, f"--job_log_dir={tmp_path / folder}", *more)

  return go


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
  """The run of a reward model, with checkpoints 2 and 3."""
  folder = tmp_path_factory.mktemp("judge")
  (folder / "judge_task.py").write_text(TASK)
  pairs = [{"prompt": f"say {i}: ", "chosen": "a" * i, "rejected": "Z"} for i in range(1, 9)]
  (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in pairs))
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(folder))
    given = ("--fdl_config=judge_task.Judge", f"--fdl.DATA_PATH={folder / 'pairs.jsonl'}")
    assert run(*given, f"--job_log_dir={folder / 'run'}") == 0
  return folder / "run"
