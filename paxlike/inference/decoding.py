# SPDX-License-Identifier: Apache-2.0
"""Decoding of text prompts: tokenization, stop strings, streamed results."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from paxlike import file_io, run_folder
from paxlike.data.chat.openai_messages import Message
from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.data.tokenizers.file_tokenizer import FileTokenizer
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError
from paxlike.inference.generate import Generator, Speed
from paxlike.inference.request import GeneratedText, Request
from paxlike.inference.sampling import Sampling
from paxlike.layers.module import Definition
from paxlike.layers.reward_model import NO_TOKENS, RewardModel
from paxlike.telemetry.run_log import RunLog

#: A text to continue, its ids, or a conversation to answer.
Prompt = str | Sequence[int] | Sequence[Message]

NO_TOKENIZER = "this experiment's data has no tokenizer, so it cannot decode text."
_ROUND = 64  # Lengths are rounded up to a multiple of this, so that programs are reused.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingOptions:
  """How prompts are continued.

  Attributes:
    max_new_tokens: A text ends after this many, or at the model's MAX_SEQ_LEN.
    sampling: How tokens are sampled.
    num_samples: Texts per prompt.
    stop: A text ends before any of these strings.
    stop_tokens: A text ends before any of these ids, besides the tokenizer's EOS and BOS.
    num_rows: Number of decode slots, at most.
    seed: Of the sampling.
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
      raise UserError("stop: expected non-empty strings.")


@dataclasses.dataclass(kw_only=True)
class Continuation:
  """One text so far.

  Attributes:
    prompt: Index of its prompt.
    sample: Index among the samples of its prompt.
    text: The text after the prompt.
    tokens: Its tokens; with a stop string they may extend beyond `text`.
    log_probabilities: Of each token.
    ended_by: "stop", "length", or None if unfinished.
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
    options: As given, with the stop strings of the chat template.
    prompt_renderer: As given.
    speed: Totals of the last `run`.
  """

  def __init__(
    self,
    definition: Definition,
    params: Mapping[str, jax.Array],
    tokenizer: Any,
    *,
    max_len: int,
    options: DecodingOptions,
    prompt_renderer: PromptRenderer | None = None,
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """Checks the tokenizer.

    Args:
      definition: A `layers.Decoder`.
      params: Its weights.
      tokenizer: A `Tokenizer` of paxlike.data.tokenizers. None: prompts are ids, texts are empty,
        and only `stop_tokens` end them.
      max_len: MAX_SEQ_LEN of the model.
      options: How prompts are continued.
      prompt_renderer: Turns conversations into prompts, and says what ends an answer.
      compiler_options: XLA's.

    Raises:
      UserError: The tokenizer has more ids than the model.
    """
    ends = {*options.stop_tokens}
    if tokenizer is not None:
      check([], definition.module, tokenizer, max_len=max_len, stop_tokens=options.stop_tokens)
      ends |= tokenizer.stop_ids
    self._tokenizer = tokenizer
    self._max_len = max_len
    self.prompt_renderer = prompt_renderer
    if prompt_renderer is not None:
      ends |= {*prompt_renderer.turn_end.ids}
    self.use(options)
    # The last generator is kept, so that the next `run` reuses its compiled programs.
    self._make = functools.lru_cache(maxsize=1)(
      lambda rows, room: Generator(
        definition,
        params,
        num_rows=rows,
        max_len=room,
        sampling=options.sampling,
        end_ids=tuple(sorted(ends)),
        compiler_options=compiler_options,
      )
    )
    self.speed = Speed()

  def use(self, options: DecodingOptions):
    """Sets the options of the next `run`; `sampling` and `stop_tokens` must be the same."""
    texts = () if self.prompt_renderer is None else self.prompt_renderer.turn_end.texts
    self.options = dataclasses.replace(options, stop=(*options.stop, *texts))

  def run(
    self,
    prompts: Sequence[Prompt],
    *,
    adapters: Sequence[int] | None = None,
    at_full_length: bool = False,
  ) -> Iterator[Continuation]:
    """Yields a result each time a text has grown; its last result has `ended_by` set.

    Args:
      prompts: What to continue or to answer.
      adapters: The adapter of each prompt; see `Request`. None: the base model.
      at_full_length: Whether programs and caches are for texts of any length, so that the next call
        reuses them.

    Raises:
      UserError: A prompt has no tokens or too many, or is text without a tokenizer.
    """
    options = self.options
    requests = [
      self._request(
        prompt,
        seed=options.seed + number * options.num_samples + sample,
        adapter=-1 if adapters is None else adapters[number],
      )
      for number, prompt in enumerate(prompts)
      for sample in range(options.num_samples)
    ]
    longest = max((len(r.tokens) + r.max_new_tokens for r in requests), default=1)
    room = self._max_len if at_full_length else min(-(-longest // _ROUND) * _ROUND, self._max_len)
    generator = self._make(min(options.num_rows, max(len(requests), 1)), room)
    self.speed = generator.speed
    for grown in generator.run(requests):
      for text in grown:
        yield self._result(text, requests[text.request].tokens)

  def _request(self, prompt: Prompt, *, seed: int, adapter: int) -> Request:
    tokens = tokens_of(prompt, self._tokenizer, self.prompt_renderer, max_len=self._max_len)
    left = self._max_len - len(tokens)
    most = min(self.options.max_new_tokens, left)
    return Request(tokens=tokens, max_new_tokens=most, seed=seed, adapter=adapter)

  def _result(self, text: GeneratedText, prompt_tokens: np.ndarray) -> Continuation:
    if self._tokenizer is None:
      return self._of(text, "", text.ended_by)
    decoded = self._tokenizer.continuation(prompt_tokens, text.tokens)
    found = [place for stop in self.options.stop if (place := decoded.find(stop)) >= 0]
    if found:
      decoded = decoded[: min(found)]
      text.close()
    return self._of(text, decoded, "stop" if found else text.ended_by)

  def _of(self, text: GeneratedText, decoded: str, ended_by: str | None) -> Continuation:
    prompt, sample = divmod(text.request, self.options.num_samples)
    return Continuation(
      prompt=prompt,
      sample=sample,
      text=decoded,
      tokens=list(text.tokens),
      log_probabilities=list(text.log_probabilities),
      ended_by=ended_by,
    )


def check(
  prompts: Sequence[Prompt],
  model: Any,
  tokenizer: Any,
  prompt_renderer: PromptRenderer | None = None,
  *,
  max_len: int,
  stop_tokens: Sequence[int] = (),
):
  """Checks that prompts can be continued; reads and writes nothing.

  Raises:
    UserError: There is no tokenizer, an id is not in the model's vocabulary, a prompt is too long,
      or the model is a reward model.
  """
  if isinstance(model, RewardModel):
    raise UserError(NO_TOKENS)
  if tokenizer is None:
    raise UserError(NO_TOKENIZER)
  if tokenizer.vocab_size > model.vocab_size:
    raise UserError(
      f"the tokenizer has {tokenizer.vocab_size} ids, but the model has {model.vocab_size}: name"
      " the run by --job_log_dir alone, or its tokenizer by TOKENIZER and VOCAB_PATH."
    )
  tokenizer.check(model.vocab_size)
  if unknown := [token for token in stop_tokens if token >= model.vocab_size]:
    raise UserError(
      f"--stop_token={unknown[0]}: the model's ids are below {model.vocab_size} (VOCAB_SIZE)."
    )
  for prompt in prompts:
    tokens_of(prompt, tokenizer, prompt_renderer, max_len=max_len)


def is_conversation(prompt: Prompt) -> bool:
  """Returns whether a prompt is a conversation."""
  return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _no_template(tokenizer: Tokenizer) -> str:
  beside = ""
  if isinstance(tokenizer, FileTokenizer):
    beside = f", or put chat_template.jinja beside its tokenizer, in {tokenizer.path.parent}"
  return (
    "a conversation needs a chat template, and this run has none: set CHAT_TEMPLATE, a knob of"
    f" experiments with datasets.Jsonl{beside}."
  )


def tokens_of(
  prompt: Any, tokenizer: Any, prompt_renderer: PromptRenderer | None, *, max_len: int
) -> np.ndarray:
  """Returns the int32 tokens of a prompt, fewer than `max_len`.

  Raises:
    UserError: It has none or too many, or is text without a tokenizer.
  """
  shown = prompt
  if isinstance(prompt, str):
    if tokenizer is None:
      raise UserError(NO_TOKENIZER)
    prefix = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tokens = np.array([*prefix, *map(int, tokenizer.encode(prompt))], np.int32)
  elif not is_conversation(prompt):
    tokens = np.array(prompt, np.int32)
  elif prompt_renderer is None:
    raise UserError(NO_TOKENIZER if tokenizer is None else _no_template(tokenizer))
  else:
    shown = prompt[-1].get("content")
    tokens = prompt_renderer.tokens(prompt).astype(np.int32)
  if not len(tokens):
    raise UserError(f"a prompt has no tokens: {shown!r}; this tokenizer adds no BOS.")
  if len(tokens) >= max_len:
    raise UserError(
      f"a prompt of {len(tokens)} tokens leaves no room for new ones in {max_len}"
      f" (MAX_SEQ_LEN): {str(shown)[:60]!r}..."
    )
  return tokens


def stream(
  results: Iterator[Continuation], options: DecodingOptions, show: Callable[[str], object]
) -> str:
  """Shows the text of one prompt piece by piece as it grows, and returns it."""
  # The tail that may be the beginning of a stop string is not shown yet.
  held_back = max(map(len, options.stop), default=0)
  shown, text = 0, ""
  for result in results:
    text = result.text
    end = max(shown, len(text) - (0 if result.ended_by else held_back))
    show(text[shown:end])
    shown = end
  return text


def write_continuations(
  decoding: Decoding, prompts: Sequence[Prompt], run_log: RunLog, path: epath.Path
):
  """Continues prompts, prints the texts and writes them to `path` as JSON lines.

  A single text is streamed; of several, each is printed when it ends.
  """
  single = len(prompts) * decoding.options.num_samples == 1
  with run_folder.writing(path.parent), file_io.replacing(path) as file:

    def noted(results: Iterator[Continuation]) -> Iterator[Continuation]:
      for result in results:
        if result.ended_by:
          prompt: Any = prompts[result.prompt]
          given = {"prompt" if isinstance(prompt, str) else "messages": prompt}
          file.write(json.dumps({**dataclasses.asdict(result), **given}) + "\n")
        yield result

    results = noted(decoding.run(prompts))
    if single:
      run_log.piece(prompts[0] if isinstance(prompts[0], str) else "")
      stream(results, decoding.options, run_log.piece)
      run_log.piece("\n")
    for result in results:
      if result.ended_by:
        prompt: Any = prompts[result.prompt]
        shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        run_log.note(f"--- {shown!r}, sample {result.sample} ({result.ended_by})\n{result.text}")
  speed = decoding.speed
  run_log.note(
    f"prefill: {speed.prefill_tokens} tokens, {speed.prefill_rate:.0f} tokens/s;"
    f" decode: {speed.decode_tokens} tokens, {speed.decode_rate:.0f} tokens/s; in {path}"
  )
