# SPDX-License-Identifier: Apache-2.0
"""Prompts for reinforcement learning, with the records by which answers are rewarded."""

import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.chat import openai_messages, templates
from paxlike.data.chat.openai_messages import Message
from paxlike.data.dataset import Arrays, RowDataset, epoch_random
from paxlike.data.text.records import Placed
from paxlike.data.tuning.templated_records import TemplatedRecords
from paxlike.errors import UserError


@configurable
class Prompts(TemplatedRecords, RowDataset):
  """The prompts of the records in a user's files, shuffled in each epoch.

  A record has its prompt, a text or messages, in a field, and further fields for the reward. Its
  sequences are not tokens to train on: `rows` returns int32 `prompts` [n, P], padded with -1, and
  `records` [n, 1], the numbers for `record`.

  Attributes:
    max_tokens: P.
    field: The field of a record that has the prompt.
  """

  def __init__(
    self,
    *,
    field: ranges.Name,
    seq_len: ranges.Size,
    max_tokens: ranges.Size,
    system: str | None = None,
    seed: ranges.NonNegative = 0,
    shuffle: bool = True,
    **others: Any,
  ):
    """Reads nothing yet.

    Args:
      field: The field of a record that has the prompt.
      seq_len: T, of the sequences that prompts with their answers are packed into.
      max_tokens: P; longer prompts are left out.
      system: Content of a system message before each prompt; None: none.
      seed: Seed of the shuffle.
      shuffle: Whether to reshuffle in every epoch.
      **others: See `TemplatedRecords`.
    """
    super().__init__(**others)
    self.seq_len = seq_len
    self.field = field
    self.max_tokens = max_tokens
    self._system = system
    self._seed = seed
    self._shuffle = shuffle

  @property
  def end_ids(self) -> list[int]:
    """The ids that end an answer."""
    return sorted(self._tokenizer.stop_ids | {*self.prompt_renderer.turn_end.ids})

  def check(self):
    _ = self._identity(), templates.template(self._template_name, vocab_path=self._vocab_path)
    self._tokenizer.check(self._vocab_size)
    if not self.end_ids and not self.prompt_renderer.turn_end.texts:
      raise UserError(f"{self.named}: the tokenizer has no token that ends an answer (EOS).")
    if texts := self.prompt_renderer.turn_end.texts:
      raise UserError(
        f"CHAT_TEMPLATE={self._template_name}: answers would end with the text {texts[0]!r}, which"
        " is no token of this tokenizer: choose another template or tokenizer."
      )

  def no_rows(self) -> Arrays:
    prompts = np.zeros((0, self.max_tokens), np.int32)
    return {"prompts": prompts, "records": np.zeros((0, 1), np.int32)}

  def fingerprint(self) -> str:
    order = (self.field, self.max_tokens, self._template_name, self._system, self._seed)
    key = json.dumps([self._identity(), order, self._shuffle, self._tokenizer.fingerprint()])
    return f"prompts {hashlib.sha256(key.encode()).hexdigest()}"

  def num_rows(self, epoch: int) -> int:
    del epoch
    return len(self._records)

  def _check_not_empty(self):
    _ = self._records  # Raises if there is none.

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    found = self._order(epoch)[numbers]
    prompts = np.full((len(found), self.max_tokens), -1, np.int32)
    for row, number in enumerate(found):
      tokens = self._records[number][0]
      prompts[row, : len(tokens)] = tokens
    return {"prompts": prompts, "records": found[:, None].astype(np.int32)}

  def record(self, number: int) -> Mapping[str, Any]:
    """Returns the fields of a record, by its number in `records`."""
    return self._records[number][1]

  def asked(self, number: int) -> tuple[list[Message], Mapping[str, Any]]:
    """Returns the messages of a record's prompt, and what it gives to a template besides."""
    record = self.record(number)
    variables = openai_messages.variables(record, place=self.named)
    return self._messages(self.named, record), variables

  def _order(self, epoch: int) -> np.ndarray:
    if not self._shuffle:
      return np.arange(len(self._records))
    return epoch_random(self._seed, epoch).permutation(len(self._records))

  def _identity(self) -> Any:
    """Returns JSON that changes with the records; cheap.

    Raises:
      UserError: There are none.
    """
    return self._files.stamps()

  def _read(self) -> Iterator[Placed]:
    return self._files.read()

  @functools.cached_property
  def _records(self) -> list[tuple[np.ndarray, Mapping[str, Any]]]:
    """The tokens of the prompt and the fields of each record."""
    found, longest, total = [], 0, 0
    for place, record in self._read():
      variables = openai_messages.variables(record, place=place)
      messages = self._messages(place, record)
      try:
        tokens = self.prompt_renderer.tokens(messages, variables)
      except UserError as error:
        raise UserError(f"{place}: {error}") from None
      if not len(tokens):
        raise UserError(f"{place}: the prompt is empty.")
      total, longest = total + 1, max(longest, len(tokens))
      if len(tokens) <= self.max_tokens:
        plain = json.loads(json.dumps(record, default=str))  # Parquet has dates and the like.
        found.append((tokens.astype(np.int32), plain))
    if not found:
      why = f"each of its {total} prompts has more than" if total else "it has no prompt of up to"
      raise UserError(f"{self.named}: {why} {self.max_tokens} tokens (MAX_PROMPT_TOKENS).")
    if left := total - len(found):
      print(
        f"{self.named}: {left} of {total} prompts are left out, which have more than"
        f" {self.max_tokens} tokens (MAX_PROMPT_TOKENS); the longest has {longest}",
        file=sys.stderr,
      )
    return found

  def _messages(self, place: str, record: Mapping[str, Any]) -> list[Any]:
    prompt = record.get(self.field)
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if self._system is not None:
      asked = [{"role": "system", "content": self._system}, *asked]
    if not openai_messages.are_messages(asked):
      there = ", ".join(record)
      raise UserError(
        f"{place}: no prompt, a text or messages, in the field {self.field} (PROMPT_FIELD). It"
        f" has: {there}."
      )
    return asked
