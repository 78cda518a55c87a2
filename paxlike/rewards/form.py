# SPDX-License-Identifier: Apache-2.0
"""Rewards of the form and the length of answers, as parts of a user's own reward."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from paxlike.config import ranges
from paxlike.config.configurable import configurable

_TAGS = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


@configurable
class AnswerTags:
  """1 if the answer is `<think>...</think><answer>...</answer>`, as in DeepSeek-R1; else 0."""

  def __call__(self, answer: str, record: Mapping[str, Any]) -> float:
    """Returns the reward."""
    del record
    return float(_TAGS.fullmatch(answer) is not None)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlong:
  """0 up to `limit - margin` characters, then less, -1 from `limit` on (DAPO, arXiv:2503.14476)."""

  limit: ranges.Positive = 4096
  margin: ranges.Positive = 1024

  def __call__(self, answer: str, record: Mapping[str, Any]) -> float:
    """Returns the reward."""
    del record
    return -min(1.0, max(0.0, (len(answer) - self.limit + self.margin) / self.margin))
