# SPDX-License-Identifier: Apache-2.0
"""Answers that are sampled a step before they are trained on, while their rewards are computed."""

import base64
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from paxlike import file_io
from paxlike.errors import UserError
from paxlike.rewards.pool import Rewarded
from paxlike.training.reinforcement.answers import Answer


@dataclasses.dataclass(kw_only=True)
class Pending:
  """Sampled answers of a step to come.

  Attributes:
    answers: As they were sampled, without rewards.
    sampled_at: Number of complete steps of the weights that they were sampled from.
    metrics: Of the sampling: name -> (sum, weight).
    rewards: Waits for their rewards; see `AnswerRewards.begin`. None: not begun.
  """

  answers: list[Answer]
  sampled_at: int
  metrics: Mapping[str, tuple[Any, Any]]
  rewards: Callable[[], list[Rewarded]] | None = None

  def saved(self) -> dict[str, Any]:
    """Returns JSON from which `restored` makes the same; rewards are computed again."""
    answers = self.answers
    return {
      "sampled_at": self.sampled_at,
      "metrics": {name: [float(x) for x in pair] for name, pair in self.metrics.items()},
      "num_prompt_tokens": [len(answer.prompt) for answer in answers],
      "num_tokens": [len(answer.tokens) for answer in answers],
      "max_tokens": [answer.max_tokens for answer in answers],
      "records": [answer.record for answer in answers],
      "seeds": [answer.seed for answer in answers],
      "has_ended": [answer.has_ended for answer in answers],
      "prompts": _text([answer.prompt for answer in answers], "<i4"),
      "tokens": _text([answer.tokens for answer in answers], "<i4"),
      "log_probabilities": _text([answer.log_probabilities for answer in answers], "<f4"),
      "values": _text([answer.values for answer in answers], "<f4"),
    }

  @classmethod
  def restored(cls, saved: Mapping[str, Any]) -> Self:
    """Returns what `saved` was made of.

    Raises:
      UserError: It is damaged.
    """
    try:
      sizes = saved["num_tokens"]
      prompts = _parts(saved["prompts"], "<i4", saved["num_prompt_tokens"])
      tokens = _parts(saved["tokens"], "<i4", sizes)
      scores = _parts(saved["log_probabilities"], "<f4", sizes)
      values = _parts(saved["values"], "<f4", sizes if saved["values"] else [0] * len(sizes))
      names = ("max_tokens", "records", "seeds", "has_ended")
      of_each = zip(prompts, tokens, scores, values, *(saved[name] for name in names), strict=True)
      answers = [
        Answer(
          prompt=prompt,
          tokens=of_answer.tolist(),
          log_probabilities=of_scores,
          values=of_values,
          max_tokens=most,
          record=record,
          seed=seed,
          has_ended=has_ended,
        )
        for prompt, of_answer, of_scores, of_values, most, record, seed, has_ended in of_each
      ]
      pairs = {name: (np.float32(x), np.float32(y)) for name, (x, y) in saved["metrics"].items()}
      return cls(answers=answers, sampled_at=int(saved["sampled_at"]), metrics=pairs)
    except file_io.MALFORMED as error:
      reason = file_io.reason(error)
      raise UserError(f"the answers in train_input of the checkpoint are damaged: {reason}.") from (
        error
      )


def ratios(found: Sequence[np.ndarray], answers: Sequence[Answer]) -> dict[str, tuple[Any, Any]]:
  """Returns metrics of the probability ratios of tokens between now and when they were sampled.

  `found` are the log-probabilities of each answer now.
  """
  old = np.concatenate([answer.log_probabilities for answer in answers])
  ratios = np.exp(np.concatenate(found) - old)
  return {
    "ratio_mean": (np.float32(ratios.sum(dtype=np.float64)), np.float32(ratios.size)),
    "ratio_min": (ratios.min(), np.float32(1)),
    "ratio_max": (ratios.max(), np.float32(1)),
  }


def importance(
  current: Sequence[np.ndarray], answers: Sequence[Answer], *, cap: float
) -> tuple[dict[str, list[np.ndarray]], tuple[Any, Any]]:
  """Corrects for answers that other weights sampled, by importance sampling truncated at `cap`.

  This is the decoupled objective (Hilton et al., 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298):
  ratios are clipped around the current policy, and each token's advantage is multiplied by its
  probability ratio between that and the policy that sampled it.

  Args:
    current: Log-probabilities of each answer under the weights before the update.
    answers: With advantages.
    cap: The largest ratio.

  Returns:
    The `advantages` and `old_log_probabilities` of the loss, and the metric of how many ratios
    exceed the cap.
  """
  pairs = list(zip(current, answers, strict=True))
  factors = [np.exp(now - answer.log_probabilities) for now, answer in pairs]
  advantages = [
    np.minimum(factor, cap) * answer.advantage
    for factor, answer in zip(factors, answers, strict=True)
  ]
  exceed = np.concatenate(factors) > cap
  corrected = {"advantages": advantages, "old_log_probabilities": list(current)}
  return corrected, (np.float32(exceed.sum()), np.float32(exceed.size))


def _text(parts: Sequence[Any], dtype: str) -> str:
  return base64.b64encode(np.concatenate(parts).astype(dtype).tobytes()).decode()


def _parts(text: str, dtype: str, sizes: Sequence[int]) -> list[np.ndarray]:
  whole = np.frombuffer(base64.b64decode(text, validate=True), dtype)
  if len(whole) != sum(sizes):
    raise ValueError(f"{len(whole)} values for answers of {sum(sizes)}")
  return np.split(whole.astype(dtype[1:]), np.cumsum(sizes)[:-1])
