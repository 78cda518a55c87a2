# SPDX-License-Identifier: Apache-2.0
"""Texts that continue prompts: tokens in and out, stop strings, results as they come."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from paxlike import run_folder
from paxlike.errors import UserError
from paxlike.generate import Generator, Request, Speed, Text
from paxlike.journal import Journal
from paxlike.layers.module import Definition
from paxlike.sampling import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How prompts are continued.

  Attributes:
    max_new_tokens: A text ends after so many, or where the sequence of the model ends.
    sampling: How tokens are chosen.
    num_samples: Texts for each prompt.
    stop: A text ends before any of these strings.
    stop_tokens: A text ends before any of these ids, as before the tokenizer's EOS and BOS.
    num_rows: Texts that are decoded together, at most.
    seed: Of the draws.
  """

  max_new_tokens: int = 256
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  num_samples: int = 1
  stop: tuple[str, ...] = ()
  stop_tokens: tuple[int, ...] = ()
  num_rows: int = 64
  seed: int = 0

  def __post_init__(self):
    if "" in self.stop:
      raise UserError("stop: expected texts that are not empty: every text has those in it.")


@dataclasses.dataclass(kw_only=True)
class Result:
  """One text so far.

  Attributes:
    prompt: Its prompt, by number.
    sample: Its number among those of its prompt.
    text: What follows the prompt.
    tokens: The same; where a stop string ended the text, up to it and perhaps a little more.
    log_probabilities: Of each token.
    ended_by: "stop", "length", or None: it goes on.
  """

  prompt: int
  sample: int
  text: str
  tokens: list[int]
  log_probabilities: list[float]
  ended_by: str | None


class Decoding:
  """Continues prompts with one model and its tokenizer.

  Attributes:
    options: As given.
    speed: Of all that it has done.
  """

  def __init__(
    self,
    definition: Definition,
    params: Mapping[str, jax.Array],
    tokenizer: Any,
    *,
    max_len: int,
    options: Options,
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """`tokenizer` is a `data.tokenizer.Tokenizer`, `max_len` the model's longest sequence.

    `compiler_options` are XLA's.

    Raises:
      UserError: The tokenizer has ids that the model does not know, or there is none.
    """
    check([], definition.module, tokenizer, max_len=max_len, stop_tokens=options.stop_tokens)
    self._tokenizer = tokenizer
    self._max_len = max_len
    self.options = options
    ends = {tokenizer.eos_id, tokenizer.bos_id, *tokenizer.end_ids, *options.stop_tokens} - {None}
    self._make = lambda rows, room: Generator(
      definition,
      params,
      num_rows=rows,
      max_len=room,
      sampling=options.sampling,
      end_ids=tuple(sorted(ends)),
      compiler_options=compiler_options,
    )
    self.speed = Speed()

  def run(self, prompts: Sequence[str]) -> Iterator[Result]:
    """Yields each text whenever it has grown; its last result has `ended_by` set."""
    options = self.options
    requests = [
      self._request(prompt, seed=options.seed + number * options.num_samples + sample)
      for number, prompt in enumerate(prompts)
      for sample in range(options.num_samples)
    ]
    room = max((len(r.tokens) + r.max_new_tokens for r in requests), default=1)
    generator = self._make(min(options.num_rows, max(len(requests), 1)), room)
    self.speed = generator.speed
    for grown in generator.run(requests):
      for text in grown:
        yield self._result(text, requests[text.request].tokens)

  def _request(self, prompt: str, *, seed: int) -> Request:
    tokens = _tokens_of(prompt, self._tokenizer, max_len=self._max_len)
    left = self._max_len - len(tokens)
    return Request(tokens=tokens, max_new_tokens=min(self.options.max_new_tokens, left), seed=seed)

  def _result(self, text: Text, prompt_tokens: np.ndarray) -> Result:
    # Together with the prompt: at the start of a text tokenizers drop a space.
    whole = self._tokenizer.decode(np.concatenate([prompt_tokens, text.tokens]).astype(np.int32))
    decoded = whole[len(self._tokenizer.decode(prompt_tokens)) :]
    found = [place for stop in self.options.stop if (place := decoded.find(stop)) >= 0]
    if found:
      decoded = decoded[: min(found)]
      text.close()
    prompt, sample = divmod(text.request, self.options.num_samples)
    return Result(
      prompt=prompt,
      sample=sample,
      text=decoded,
      tokens=list(text.tokens),
      log_probabilities=list(text.log_probabilities),
      ended_by="stop" if found else text.ended_by,
    )


def check(
  prompts: Sequence[str],
  model: Any,
  tokenizer: Any,
  *,
  max_len: int,
  stop_tokens: Sequence[int] = (),
):
  """Finds whether prompts can be continued, before anything is read or written.

  Raises:
    UserError: There is no tokenizer, it or a stop token has ids that the model does not know, or a
      prompt is too long.
  """
  if tokenizer is None:
    raise UserError("this experiment's data have no tokenizer, so it cannot decode text.")
  if tokenizer.vocab_size > model.vocab_size:
    raise UserError(
      f"the tokenizer has {tokenizer.vocab_size} ids, but the model knows {model.vocab_size}."
    )
  tokenizer.check(model.vocab_size)
  if unknown := [token for token in stop_tokens if token >= model.vocab_size]:
    raise UserError(
      f"--stop_token={unknown[0]}: the model knows the ids below {model.vocab_size} (VOCAB_SIZE)."
    )
  for prompt in prompts:
    _tokens_of(prompt, tokenizer, max_len=max_len)


def _tokens_of(prompt: str, tokenizer: Any, *, max_len: int) -> np.ndarray:
  prefix = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  tokens = np.array([*prefix, *map(int, tokenizer.encode(prompt))], np.int32)
  if not len(tokens):
    raise UserError(
      f"a prompt has no tokens: {prompt!r}; this tokenizer has none that begins a text."
    )
  if len(tokens) >= max_len:
    raise UserError(
      f"a prompt of {len(tokens)} tokens leaves no room in sequences of {max_len}"
      f" (MAX_SEQ_LEN): {prompt[:60]!r}..."
    )
  return tokens


def tell(decoding: Decoding, prompts: Sequence[str], journal: Journal, path: epath.Path):
  """Continues prompts, prints the texts and writes them to `path`, a line of JSON each.

  A single text is printed as it grows, several one after the other as they end.
  """
  options = decoding.options
  single = len(prompts) * options.num_samples == 1
  # What may yet turn out to be the beginning of a stop string is held back.
  held_back = max(map(len, options.stop), default=0)
  shown = 0
  if single:
    journal.piece(prompts[0])
  with run_folder.writing(path.parent), run_folder.replacing(path) as file:
    for result in decoding.run(prompts):
      prompt = prompts[result.prompt]
      if single:
        end = max(shown, len(result.text) - (0 if result.ended_by else held_back))
        journal.piece(result.text[shown:end])
        shown = end
      if result.ended_by:
        file.write(json.dumps(dataclasses.asdict(result) | {"prompt": prompt}) + "\n")
        if not single:
          journal.note(f"--- {prompt!r}, sample {result.sample} ({result.ended_by})\n{result.text}")
  if single:
    journal.piece("\n")
  speed = decoding.speed
  journal.note(
    f"prefill: {speed.prefill_tokens} tokens, {speed.prefill_rate:.0f} tokens/s;"
    f" decode: {speed.decode_tokens} tokens, {speed.decode_rate:.0f} tokens/s; in {path}"
  )
