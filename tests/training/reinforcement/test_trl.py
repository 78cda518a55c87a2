# SPDX-License-Identifier: Apache-2.0
"""Steps on the same answers are those of TRL's GRPOTrainer."""

import json
from typing import Any

import numpy as np
import pytest
from helpers import tiny_tokenizers
from helpers.program import run

from paxlike.convert.main import run as convert
from paxlike.training.reinforcement.policy_training import PolicyTraining

STEPS, PROMPTS, GROUP, TOKENS = 4, 2, 4, 6
CONFIG = {
  "vocab_size": 257,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 32,
  "tie_word_embeddings": False,
  "eos_token_id": 256,
  "bos_token_id": None,
  "pad_token_id": None,  # Torch gives the embedding of a padding token no gradient.
}
TASK = """
from paxlike.experiments.llama import Llama
from paxlike.experiments.reinforcement import PromptFiles

class Small(PromptFiles, Llama):
  VOCAB_SIZE = 257
  MAX_SEQ_LEN = 24
  NUM_LAYERS = 2
  MODEL_DIMS = 32
  HIDDEN_DIMS = 48
  NUM_HEADS = 4
  NUM_KV_HEADS = 2
  NORM_EPSILON = 1e-6
  FPROP_DTYPE = "float32"
  PERCORE_BATCH_SIZE = 0.5
  ICI_MESH_SHAPE = (2, 2, 2)
  LEARNING_RATE = 0.003
  LR_SCHEDULE = "constant"
  WEIGHT_DECAY = 0.0
  ADAM_BETA2 = 0.999
  SUMMARY_INTERVAL_STEPS = 1
  EVAL_INTERVAL_STEPS = 0
  CHECKPOINT_EVERY_N_STEPS = 0
  REWARD = "trl_reward.vowels"
  REWARD_WORKERS = 1
  PROMPTS_PER_STEP = 2
  GROUP_SIZE = 4
  MAX_PROMPT_TOKENS = 8
  MAX_NEW_TOKENS = 6
  MAX_STEPS = 4
  KL_BETA = 0.05
"""
REWARD = """
def vowels(answer, record):
  return sum(map(ord, answer)) % 7
"""


@pytest.fixture
def answers(monkeypatch):
  """The answers of each step of the run."""
  steps = []

  def record(name):
    rollout = getattr(PolicyTraining, name)

    def recorded(self, *args):
      found = rollout(self, *args)
      steps.append(found[0])
      return found

    monkeypatch.setattr(PolicyTraining, name, recorded)

  record("_rollout")
  record("_rollout_ahead")
  return steps


def recording_trainer(shown: list[dict[str, float]], *, behind: bool, cap: float | None) -> Any:
  """Returns TRL's trainer, which adds loss, gradient norm and KL of each update to `shown`.

  If `behind`, the weights that have sampled the answers are those that it had a step before, and
  `cap` is its cap of truncated importance sampling.
  """
  import torch
  import trl

  library: Any = trl

  class Exact(library.GRPOTrainer):
    """Keeps losses and norms as they are: those that are logged are rounded."""

    before: Any = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
      output = super()._generate_and_score_completions(inputs)
      if behind:
        now = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        old, current = self._scores(self.before or now, output), self._scores(now, output)
        output["old_per_token_logps"] = old if cap is None else current
        output["importance_sampling_ratio"] = torch.exp(current - old).clamp(max=cap or 1.0)
        self.before = now
      return output

    @torch.no_grad()
    def _scores(self, weights: Any, output: Any) -> Any:
      self.model.load_state_dict(weights)
      ids, masks = (
        torch.cat([output[f"{part}_{name}"] for part in ("prompt", "completion")], 1)
        for name in ("ids", "mask")
      )
      size = output["completion_ids"].shape[1]
      return self._get_per_token_logps_and_entropies(self.model, ids, masks, size)[0]

    def compute_loss(self, *args: Any, **more: Any) -> Any:
      self.use_vllm = cap is not None  # Its correction is for answers that vLLM sampled.
      loss = super().compute_loss(*args, **more)
      self.use_vllm = False
      shown.append({"loss": float(loss)})
      return loss

    def log(self, logs: dict[str, float], *args: Any, **more: Any):
      if "grad_norm" in logs:
        kl = self._metrics["train"]["kl"][-1]
        shown[-1] |= {"grad_norm": float(logs["grad_norm"]), "kl": kl}
      super().log(logs, *args, **more)

  return Exact


def trl_steps(
  folder, steps, out, *, updates: int, behind: bool, cap: float | None, **how: Any
) -> list[dict[str, float]]:
  """Returns loss, gradient norm and KL of each update on these answers."""
  import datasets
  import transformers
  import trl

  library: Any = trl
  shown: list[dict[str, float]] = []
  left = list(steps)
  rewards: list[float] = []

  def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
    now = left.pop(0)
    rewards[:] = [answer.reward for answer in now]
    return {
      "prompt_ids": [answer.prompt.tolist() for answer in now],
      "completion_ids": [list(answer.tokens) for answer in now],
      "logprobs": None,
    }

  trainer = recording_trainer(shown, behind=behind, cap=cap)(
    model=transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"),
    reward_funcs=lambda **unused: list(rewards),
    rollout_func=rollout,
    processing_class=transformers.PreTrainedTokenizerFast(
      tokenizer_object=tiny_tokenizers.words(257), eos_token="t256", pad_token="t3"
    ),
    train_dataset=datasets.Dataset.from_list([{"prompt": "t4"}] * (STEPS * PROMPTS)),
    args=library.GRPOConfig(
      output_dir=str(out),
      per_device_train_batch_size=PROMPTS * GROUP,
      num_generations=GROUP,
      max_completion_length=TOKENS,
      max_steps=STEPS * updates,
      num_iterations=updates,
      learning_rate=0.003,
      lr_scheduler_type="constant",
      max_grad_norm=1.0,
      beta=0.05,
      **how,
      logging_steps=1,
      report_to=[],
      save_strategy="no",
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      disable_tqdm=True,
    ),
  )
  trainer.train()
  return shown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
  "loss_per, advantages, updates, behind, cap, how",
  [
    ("token", "grpo", 2, 0, None, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("answer", "grpo", 1, 0, None, {"loss_type": "grpo"}),
    ("limit", "dr_grpo", 1, 0, None, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    ("token", "grpo", 2, 1, None, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("answer", "grpo", 1, 1, 1.2, {"loss_type": "grpo"}),
  ],
)
def test_steps_are_those_of_trl(
  tmp_path, monkeypatch, answers, loss_per, advantages, updates, behind, cap, how
):
  import torch
  import transformers

  torch.manual_seed(0)
  config = transformers.LlamaConfig(**CONFIG, initializer_range=0.3)
  source = tmp_path / "source"
  model = transformers.LlamaForCausalLM(config)
  with torch.no_grad():
    model.lm_head.weight[256] *= 5  # So that some answers end.
  model.save_pretrained(source)
  assert convert(["--from=hf", f"--path={source}", f"--to={tmp_path / 'model'}"]) == 0
  (tmp_path / "trl_task.py").write_text(TASK)
  (tmp_path / "trl_reward.py").write_text(REWARD)
  monkeypatch.syspath_prepend(str(tmp_path))
  lines = [json.dumps({"prompt": f"{word}?"}) for word in ("one", "two", "seven", "ten")]
  (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
  given = (
    "--fdl_config=trl_task.Small",
    f"--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / 'model'}",
    f"--fdl.DATA_PATH={tmp_path / 'prompts.jsonl'}",
    f"--fdl.LOSS_PER={loss_per}",
    f"--fdl.ADVANTAGES={advantages}",
    f"--job_log_dir={tmp_path / 'run'}",
    *(("--fdl.UPDATES_PER_STEP=2", "--fdl.CLIP_HIGH=0.28") if updates == 2 else ()),
    *((f"--fdl.ROLLOUTS_BEHIND={behind}", f"--fdl.IMPORTANCE_CAP={cap}") if behind else ()),
  )
  assert run(*given) == 0
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  ours = [one for line in lines if (one := json.loads(line))["kind"] == "train"]
  out = tmp_path / "trl"
  each = trl_steps(source, answers, out, updates=updates, behind=bool(behind), cap=cap, **how)
  assert len(ours) == len(answers) == STEPS
  theirs = [
    {name: np.mean([one[name] for one in each[at : at + updates]]) for name in each[at]}
    for at in range(0, STEPS * updates, updates)
  ]
  assert {answer.has_ended for step in answers for answer in step} == {False, True}
  for mine, other in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(mine["loss"], other["loss"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mine["grad_norm"], other["grad_norm"], rtol=2e-4)
    np.testing.assert_allclose(mine["reference_kl"], other["kl"], rtol=2e-4, atol=1e-6)
  assert ours[-1]["reference_kl"] > 0.01
  assert (max(mine["clipped_fraction"] for mine in ours) > 0) == (updates > 1)
  if behind:
    assert [mine["staleness"] for mine in ours] == [0, *[updates] * (STEPS - 1)]
    assert ours[0]["ratio_max"] == 1 < ours[1]["ratio_max"]
  if cap is not None:
    assert ours[0]["importance_capped_fraction"] == 0 < ours[1]["importance_capped_fraction"]
