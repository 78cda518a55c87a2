# SPDX-License-Identifier: Apache-2.0
"""Rewards of answers, which are called with the answer's text and the record of its prompt.

A reward is a function `reward(answer: str, record: dict) -> float`, or -> dict of named parts that
are logged, and whose sum is the reward. The knob REWARD names one of `REWARDS`, or a function of
the user's. Rewards are called in worker processes, which import no JAX.
"""

from paxlike.rewards.answers import ExactAnswer, MathAnswer
from paxlike.rewards.form import AnswerTags, Overlong
from paxlike.rewards.programs import PythonTests

REWARDS = {
  "answer_tags": AnswerTags,
  "exact_answer": ExactAnswer,
  "math_answer": MathAnswer,
  "overlong": Overlong,
  "python_tests": PythonTests,
}

__all__ = ["REWARDS", "AnswerTags", "ExactAnswer", "MathAnswer", "Overlong", "PythonTests"]
