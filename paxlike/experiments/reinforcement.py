# SPDX-License-Identifier: Apache-2.0
"""Mixins of reinforcement learning: `class MyTask(PromptFiles, SmallQwen25)`."""

from typing import Any, Literal

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints.warm_start import Restore
from paxlike.config import ranges
from paxlike.config.knobs import UNSET
from paxlike.data.tuning.prompts import Prompts
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.experiments import datasets
from paxlike.inference.sampling import Sampling
from paxlike.layers.decoder import VALUE_HEAD
from paxlike.rewards import REWARDS, pool
from paxlike.training.evaluation import EvalSet
from paxlike.training.objectives import Grpo, Ppo
from paxlike.training.reinforcement import advantages
from paxlike.training.reinforcement.model_reward import ModelReward
from paxlike.training.reinforcement.reward_set import RewardSet
from paxlike.training.reinforcement.rollouts import Rollouts
from paxlike.training.reinforcement.values import Gae

_ADVANTAGES = {one.__name__: one for one in (advantages.grpo, advantages.dr_grpo, advantages.rloo)}
_NORMALIZATIONS = {
  "token": advantages.by_token,
  "answer": advantages.by_answer,
  "limit": advantages.by_limit,
}
Split = Literal["train", "validation"]


class Reinforcement(Experiment):
  """Reinforcement learning on prompts (GRPO, PPO), rewarded by Python functions or a model.

  PERCORE_BATCH_SIZE sequences per device are a microbatch, into which prompts with their answers
  are packed; a step has as many as it needs. A subclass has `prompts`; see `PromptFiles`.
  """

  #: Reward of an answer: MODULE.FUNCTION, or exact_answer, math_answer, python_tests, answer_tags
  #: or overlong of paxlike.rewards. None: REWARD_MODEL's alone.
  REWARD: ranges.Name | None = None
  #: Folder of the run of a reward model, whose reward of an answer is added. None: there is none.
  REWARD_MODEL: ranges.Path | None = None
  REWARD_MODEL_STEP: ranges.NonNegative | None = None  #: Its checkpoint. None: the newest.
  REWARD_SECONDS: ranges.Interval = 10.0  #: Time limit of one reward; after it, the reward is 0.
  REWARD_WORKERS: ranges.Size = 4  #: Processes on each host that compute rewards.
  PROMPTS_PER_STEP: ranges.Size = UNSET  #: Prompts of a step.
  #: Prompts that a step tries at most, to replace those whose answers all have the same reward
  #: (DAPO's dynamic sampling). None: none is replaced.
  MAX_PROMPTS_PER_STEP: ranges.Size | None = None
  #: Updates of a step, each on all its answers. With more than one, probability ratios are clipped.
  UPDATES_PER_STEP: ranges.Size = 1
  #: 1: the answers of a step are sampled before the update of the previous step, and rewarded
  #: during that update and the next sampling. Probability ratios are then clipped.
  ROLLOUTS_BEHIND: Literal[0, 1] = 0
  #: With ROLLOUTS_BEHIND: ratios are clipped around the policy before the step, and advantages
  #: multiplied by its ratios to the policy that sampled, up to this (truncated importance
  #: sampling). None: the clipped ratios are those to the policy that sampled.
  IMPORTANCE_CAP: ranges.Factor | None = None
  CLIP_LOW: ranges.Fraction = 0.2  #: How far ratios may fall below 1.
  CLIP_HIGH: ranges.Factor = 0.2  #: How far ratios may rise above 1; DAPO has 0.28.
  GROUP_SIZE: ranges.Size = 8  #: Answers to each prompt.
  MAX_NEW_TOKENS: ranges.Size = UNSET  #: The most tokens of an answer.
  ROLLOUT_TEMPERATURE: ranges.PositiveFloat = 1.0  #: Divides the logits; also those of the loss.
  DECODE_SLOTS: ranges.Size = 64  #: Answers that are decoded at the same time.
  #: grpo: rewards minus the mean of the group, over its standard deviation. dr_grpo: minus the mean
  #: alone. rloo: minus the mean of the others. gae (PPO): of each token, by a value head, which is
  #: trained with the policy; GROUP_SIZE may then be 1.
  ADVANTAGES: Literal["grpo", "dr_grpo", "rloo", "gae"] = "grpo"
  GAE_LAMBDA: ranges.Fraction = 0.95  #: Of gae: 0 trusts the values most, 1 the rewards.
  DISCOUNT: ranges.Share = 1.0  #: Factor of a reward for each token that it is later (gamma).
  WHITEN_ADVANTAGES: bool = True  #: Whether those of gae get mean 0 and variance 1 in each step.
  VALUE_LOSS: ranges.Weight = 0.5  #: Weight of half the squared error of the values.
  #: How far an update moves a value from what it was when sampling. None: there is no limit.
  VALUE_CLIP: ranges.Factor | None = None
  #: The loss is the mean over the tokens of all answers, over answers of the means over their
  #: tokens, or the sum over tokens divided by the most there could be.
  LOSS_PER: Literal["token", "answer", "limit"] = "token"
  MASK_TRUNCATED: bool = False  #: Whether answers of MAX_NEW_TOKENS without an end have no loss.
  KL_BETA: ranges.NonNegativeFloat = 0.0  #: Strength of the KL penalty towards the initial model.
  #: Where it is: a term of the loss, or, with gae, part of each token's reward. None: with gae the
  #: reward, else the loss.
  KL_IN: Literal["loss", "reward"] | None = None
  EVAL_PROMPTS: ranges.Size | None = None  #: How many prompts are evaluated on. None: all.

  def has_values(self) -> bool:
    """Returns whether a value head is trained."""
    return self.ADVANTAGES == "gae"

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    if self.has_values():
      # From zeros, so that the first values are no worse than none.
      model.value_head = fdl.Partial(layers.Linear, role="value_head", init=layers.zeros)
    return model

  def restore(self) -> fdl.Config[Restore] | None:
    restore = super().restore()
    if restore is not None and self.has_values():
      restore.ignore = (*restore.ignore, VALUE_HEAD)  # Models to start from have none.
    return restore

  def objective(self) -> fdl.Config[Grpo]:
    has_values, is_corrected = self.has_values(), self.IMPORTANCE_CAP is not None
    is_clipped = self.UPDATES_PER_STEP > 1 or (self.ROLLOUTS_BEHIND > 0 and not is_corrected)
    objective: Any = fdl.Config(
      Ppo if has_values else Grpo,
      beta=self.KL_BETA,
      sampling=fdl.Config(Sampling, temperature=self.ROLLOUT_TEMPERATURE),
    )
    if is_clipped:  # Else the ratio is 1.
      objective.clip_low, objective.clip_high = self.CLIP_LOW, self.CLIP_HIGH
    where = self.KL_IN if self.KL_BETA else None
    if has_values:
      objective.value_weight, objective.reward_kl = self.VALUE_LOSS, where != "loss"
      if is_clipped:
        objective.value_clip = self.VALUE_CLIP
    elif where == "reward":
      raise UserError(
        f"KL_IN=reward gives each token a reward, which ADVANTAGES={self.ADVANTAGES} does not use:"
        " set ADVANTAGES=gae, or leave KL_IN out."
      )
    return objective

  def advantages(self) -> Any:
    """Returns what computes advantages: a function, or the graph of a `Gae`."""
    if self.ADVANTAGES != "gae":
      return _ADVANTAGES[self.ADVANTAGES]
    return fdl.Config(
      Gae,
      gae_lambda=self.GAE_LAMBDA,
      discount=self.DISCOUNT,
      whitens=self.WHITEN_ADVANTAGES,
    )

  def rollouts(self) -> fdl.Config[Rollouts]:
    return fdl.copy_with(
      self.answers(),
      reward=self.reward(),
      reward_model=self.reward_model(),
      most_prompts=self.MAX_PROMPTS_PER_STEP,
      num_updates=self.UPDATES_PER_STEP,
      behind=self.ROLLOUTS_BEHIND,
      importance_cap=self.IMPORTANCE_CAP if self.ROLLOUTS_BEHIND else None,
      advantages=self.advantages(),
      normalization=_NORMALIZATIONS[self.LOSS_PER],
      reward_seconds=self.REWARD_SECONDS,
      reward_workers=self.REWARD_WORKERS,
    )

  def answers(self) -> fdl.Config[Rollouts]:
    """Returns how the answers of a step are sampled; they have no reward."""
    return fdl.Config(
      Rollouts,
      reward=None,
      num_prompts=self.PROMPTS_PER_STEP,
      group_size=self.GROUP_SIZE,
      max_new_tokens=self.MAX_NEW_TOKENS,
      num_slots=self.DECODE_SLOTS,
      mask_truncated=self.MASK_TRUNCATED,
    )

  def reward(self) -> Any:
    """Returns the reward: the graph of an object, or a function that worker processes import.

    None: there is only a reward model.
    """
    name = self.REWARD
    if name is None:
      if self.REWARD_MODEL is None:
        raise UserError(
          "REWARD is not set: it is MODULE.FUNCTION, or one of"
          f" {', '.join(REWARDS)}. Or set REWARD_MODEL."
        )
      return None
    if name in REWARDS:
      return fdl.Config(REWARDS[name])
    setting = self.settings().get("REWARD")
    if setting is not None and setting.source == "experiment.json":
      raise UserError(
        f"REWARD={name} is named by a file of the run: to import and call it, name the experiment"
        " (--fdl_config) and set REWARD as the run was started with."
      )
    return pool.find(name)

  def reward_model(self) -> fdl.Config[ModelReward] | None:
    """Returns the reward model; None: there is none."""
    if self.REWARD_MODEL is None:
      return None
    return fdl.Config(ModelReward, path=self.REWARD_MODEL, step=self.REWARD_MODEL_STEP)

  def prompts(self, split: Split) -> fdl.Config[Prompts] | None:
    """Returns the prompts of a split; None if it has none."""
    raise UserError(f"{type(self).__name__} has no prompts: define `prompts`, or use PromptFiles.")

  def train_data(self) -> fdl.Config[Prompts] | None:
    return self.prompts("train")

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if (prompts := self.prompts("validation")) is None:
      return {}
    reward_set: fdl.Config[Any] = fdl.Config(
      RewardSet,
      dataset=prompts,
      reward=self.reward(),
      reward_model=self.reward_model(),
      max_new_tokens=self.MAX_NEW_TOKENS,
      num_prompts=self.EVAL_PROMPTS,
      num_slots=self.DECODE_SLOTS,
      reward_seconds=self.REWARD_SECONDS,
      reward_workers=self.REWARD_WORKERS,
    )
    return {"validation": reward_set}


class PromptFiles(Reinforcement, datasets.Chat):
  """Prompts in the user's files: .jsonl (.zst, .gz), .parquet or .arrow."""

  EVAL_DATA_PATH: ranges.Path | None = None  #: Files to evaluate on. None: no evaluation.
  PROMPT_FIELD: ranges.Name = "prompt"  #: Field of records that has the prompt: text or messages.
  SYSTEM_PROMPT: ranges.Name | None = None  #: System message before each prompt. None: none.
  MAX_PROMPT_TOKENS: ranges.Size = UNSET  #: Prompts with more tokens are left out.

  def prompts(self, split: Split) -> fdl.Config[Prompts] | None:
    knob = "DATA_PATH" if split == "train" else "EVAL_DATA_PATH"
    path, tokenizer = getattr(self, knob), self.tokenizer()
    if tokenizer is None:
      raise UserError("TOKENIZER=character is for plain text: use another one for prompts.")
    if path is None and split == "validation":
      return None
    return fdl.Config(
      Prompts,
      path=path,
      field=self.PROMPT_FIELD,
      tokenizer=tokenizer,
      vocab_size=self.VOCAB_SIZE,
      seq_len=self.MAX_SEQ_LEN,
      max_tokens=self.MAX_PROMPT_TOKENS,
      template=self.CHAT_TEMPLATE,
      vocab_path=self.VOCAB_PATH,
      system=self.SYSTEM_PROMPT,
      seed=self.RANDOM_SEED,
      shuffle=split == "train",
      knob=knob,
    )
