# SPDX-License-Identifier: Apache-2.0
"""Checks of a run of reinforcement learning before anything is computed or written."""

from typing import TYPE_CHECKING, Any

from flax import nnx

from paxlike.checkpoints.checkpoint import MAX_INPUT_BYTES
from paxlike.data.tuning.prompts import Prompts
from paxlike.errors import UserError
from paxlike.inference.sampling import Sampling
from paxlike.layers.dropout import Dropout
from paxlike.layers.moe.dispatch import Capacity
from paxlike.layers.reward_model import RewardModel
from paxlike.training.objectives import Grpo, OnPolicyGkd, Ppo
from paxlike.training.pipeline_loss import pipeline_of
from paxlike.training.reinforcement.reward_set import RewardSet
from paxlike.training.reinforcement.values import Gae

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer

_BYTES_PER_TOKEN = 24  # Of answers in a checkpoint: see `Pending.saved`.


def check(trainer: "Trainer"):
  """Checks that a trainer with `rollouts` can take its steps; reads nothing.

  Raises:
    UserError: An option does not go with reinforcement learning, or the answers do not fit.
  """
  how, data = trainer.rollouts, trainer.data
  assert how is not None
  if not isinstance(trainer.objective, Grpo | OnPolicyGkd) or not isinstance(data, Prompts):
    raise UserError(
      "rollouts need the objective Grpo or OnPolicyGkd, and Prompts as training data: see"
      " experiments/reinforcement.py and distillation.py."
    )
  check_passes(trainer, trainer.objective.sampling)
  if how.num_given < how.num_prompts:
    raise UserError(
      f"MAX_PROMPTS_PER_STEP={how.most_prompts} is less than PROMPTS_PER_STEP={how.num_prompts}."
    )
  if how.behind and how.most_prompts is not None:
    raise UserError(
      f"MAX_PROMPTS_PER_STEP={how.most_prompts} replaces prompts by their rewards, for which"
      " ROLLOUTS_BEHIND=1 does not wait: leave one of them out."
    )
  most = how.num_prompts * how.group_size * (data.max_tokens + how.max_new_tokens)
  if how.behind and most * _BYTES_PER_TOKEN > MAX_INPUT_BYTES:
    raise UserError(
      f"ROLLOUTS_BEHIND=1: the up to {most:,} tokens of a step are too many for a checkpoint; use"
      " smaller PROMPTS_PER_STEP, GROUP_SIZE or MAX_NEW_TOKENS."
    )
  has_values, has_head = isinstance(how.advantages, Gae), trainer.model.value_head is not None
  if not has_values == has_head == isinstance(trainer.objective, Ppo):
    raise UserError(
      "advantages by Gae, the objective Ppo and the model's value_head need each other: set"
      " ADVANTAGES=gae."
    )
  if how.group_size < 2 and not has_values and isinstance(trainer.objective, Grpo):
    raise UserError("GROUP_SIZE=1: advantages compare answers to the same prompt; use 2 or more.")
  if how.group_size < 2 and how.most_prompts is not None:
    raise UserError(
      "MAX_PROMPTS_PER_STEP replaces prompts whose answers all have the same reward, as with"
      " GROUP_SIZE=1 all do: leave it out, or use 2 or more."
    )
  if data.max_tokens + how.max_new_tokens > data.seq_len + 1:
    raise UserError(
      f"MAX_PROMPT_TOKENS={data.max_tokens} and MAX_NEW_TOKENS={how.max_new_tokens} exceed"
      f" MAX_SEQ_LEN={data.seq_len}."
    )


def check_reward_models(trainer: "Trainer", *, training: bool):
  """Checks the reward models of a run, if it is for training, and of its eval sets.

  Raises:
    UserError: A folder has no reward model, or it cannot score the answers.
  """
  sets = [one for one in trainer.eval_data.values() if isinstance(one, RewardSet)]
  users: list[Any] = [(one, one.dataset) for one in sets]
  if training and trainer.rollouts is not None:
    users.append((trainer.rollouts, trainer.data))
  for how, data in users:
    if how.reward_model is not None:
      limits = {"max_prompt_tokens": data.max_tokens, "max_new_tokens": how.max_new_tokens}
      how.reward_model.check(trainer.devices, **limits)


def check_passes(trainer: "Trainer", sampling: Sampling):
  """Checks that a trainer's model can be sampled from and trained in two passes; reads nothing.

  Raises:
    UserError: An option does not go with that.
  """
  modules = [module for _, module in nnx.iter_modules(trainer.model)]
  switch, seq_len = trainer.model.rope_switch, trainer.data.seq_len
  without: dict[str, Any] = {
    "reward models": isinstance(trainer.model, RewardModel),
    f"MAX_SEQ_LEN={seq_len} with LongRoPE, whose factors change beyond {switch} tokens": (
      switch is not None and seq_len > switch
    ),
    "GRADIENT_ACCUMULATION_STEPS": trainer.accumulation_steps > 1,
    "PERCORE_BATCH_SIZE_RAMP and MAX_SEQ_LEN_RAMP": trainer.ramps,
    "LOG_LAYERS_EVERY": trainer.log_layers_every,
    "REPEAT_STEP_EVERY": trainer.repeat_step_every,
    "ON_SPIKE=rollback": trainer.optimizer.rolls_back,
    "NUM_STAGES": pipeline_of(trainer.definition) is not None,
    "Z_LOSS and LABEL_SMOOTHING": trainer.model.z_loss or trainer.model.label_smoothing,
    "--compiled_step": trainer.execution.compiled_step is not None,
    "dropout": any(isinstance(one, Dropout) and one.rate for one in modules),
    "MOE_DISPATCH=capacity, with which a token depends on later ones": any(
      isinstance(getattr(one, "dispatch", None), Capacity) for one in modules
    ),
    "sampling with top_k, top_p, min_p or temperature 0": (
      sampling != Sampling(temperature=sampling.temperature) or not sampling.temperature
    ),
  }
  for name, given in without.items():
    if given:
      raise UserError(f"{name}: not supported by reinforcement learning.")
