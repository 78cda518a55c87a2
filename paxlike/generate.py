# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache of keys and values, by continuous batching (Yu et al., 2022).

A fixed number of rows decodes together. As soon as a row's text has ended, the next prompt takes
its place, so that throughput does not fall to that of the longest text.
"""

import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlike import mesh, progress
from paxlike.errors import UserError
from paxlike.layers.context import Context
from paxlike.layers.module import Definition, Params
from paxlike.sampling import Sampling

STEPS_PER_CALL = 16
# Caches begin with room for texts of so many tokens.
_LEAST_ROOM = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A prompt to continue.

  Attributes:
    tokens: int32, at least one.
    max_new_tokens: The text ends after so many.
    seed: Of its draws, which depend on nothing else.
  """

  tokens: np.ndarray
  max_new_tokens: int
  seed: int = 0


@dataclasses.dataclass(kw_only=True)
class Text:
  """What a request has become so far.

  Attributes:
    request: Its number in the order given.
    prompt_length: Tokens of its prompt.
    tokens: New ones; the token that ended the text is not among them.
    log_probabilities: Of each, under the model.
    ended_by: "stop" (an end token, or the caller's `close`), "length", or None: it goes on.
  """

  request: int
  prompt_length: int
  tokens: list[int] = dataclasses.field(default_factory=list)
  log_probabilities: list[float] = dataclasses.field(default_factory=list)
  ended_by: str | None = None

  @property
  def length(self) -> int:
    """Tokens of prompt and text."""
    return self.prompt_length + len(self.tokens)

  def close(self):
    """Ends the text: its row serves another."""
    self.ended_by = self.ended_by or "stop"


@dataclasses.dataclass
class Speed:
  """Tokens and seconds of both phases, without compilation."""

  prefill_tokens: int = 0
  prefill_seconds: float = 0.0
  decode_tokens: int = 0
  decode_seconds: float = 0.0

  @property
  def prefill_rate(self) -> float:
    """Prompt tokens a second."""
    return self.prefill_tokens / max(self.prefill_seconds, 1e-9)

  @property
  def decode_rate(self) -> float:
    """New tokens a second, of all rows together."""
    return self.decode_tokens / max(self.decode_seconds, 1e-9)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
  """The state of all rows; that of a free one is position -1.

  Attributes:
    caches: Of the tokens before the last.
    tokens_B: The last token, not yet cached.
    positions_B: Its position.
    left_B: How many tokens may still follow it.
    keys_B: A row's draws come from this and the position.
  """

  caches: Any
  tokens_B: jax.Array
  positions_B: jax.Array
  left_B: jax.Array
  keys_B: jax.Array


class Generator:
  """Continues prompts with one model.

  Attributes:
    speed: Of all that it has done.
  """

  def __init__(
    self,
    definition: Definition,
    params: Mapping[str, jax.Array],
    *,
    num_rows: int,
    max_len: int,
    sampling: Sampling | None = None,
    end_ids: Sequence[int] = (),
    steps_per_call: int = STEPS_PER_CALL,
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """Allocates caches for short texts, which grow by doubling with the longest.

    Args:
      definition: A `layers.Decoder`; unrolled ones are faster.
      params: Its weights.
      num_rows: Texts that are decoded together.
      max_len: Tokens of the longest text, its prompt among them.
      sampling: How tokens are chosen; None: the likeliest.
      end_ids: Tokens that end a text.
      steps_per_call: Tokens of each row between looks at the result. More need less of the host,
        and a row that has ended idles for longer.
      compiler_options: XLA's.
    """
    progress.enter("decode_compile")
    self.speed = Speed()
    self._definition = definition
    self._module: Any = definition.module
    self._compiler_options = dict(compiler_options or {})
    prepare = jax.jit(definition.prepare, compiler_options=self._compiler_options)
    self._params: Params = prepare(dict(params))
    self._num_rows = num_rows
    self._max_len = max_len
    self._sampling = sampling or Sampling()
    self._end_ids = tuple(end_ids)
    self._steps = steps_per_call
    self._compiled: dict[Any, Any] = {}
    self._start()

  def run(self, requests: Iterable[Request]) -> Iterator[list[Text]]:
    """Yields, again and again, the texts that have grown; each ends with `ended_by` set.

    Raises:
      UserError: A prompt is empty, or with its new tokens too long for `max_len`.
    """
    waiting = collections.deque(enumerate(requests))
    for number, request in waiting:
      self._check(number, request)
    texts: dict[int, Text] = {}
    self._start()
    while waiting or texts:
      free = [row for row in range(self._num_rows) if row not in texts]
      grown = {}
      if waiting and free:
        started = [(row, *waiting.popleft()) for row, _ in zip(free, list(waiting), strict=False)]
        grown |= self._fill(started)
        texts |= grown
      open_rows = [row for row, text in texts.items() if text.ended_by is None]
      if open_rows:
        self._advance({row: texts[row] for row in open_rows})
        grown |= {row: texts[row] for row in open_rows}
      yield list(grown.values())
      texts = {row: text for row, text in texts.items() if text.ended_by is None}

  def _check(self, number: int, request: Request):
    size = len(request.tokens)
    if not size:
      raise UserError(f"prompt {number} is empty: a text needs a token to begin with.")
    if request.max_new_tokens < 1:
      raise UserError("max_new_tokens must be at least 1.")
    if size + request.max_new_tokens > self._max_len:
      raise UserError(
        f"prompt {number} has {size} tokens and {request.max_new_tokens} to come, more than the"
        f" {self._max_len} that the model's sequences have (MAX_SEQ_LEN)."
      )

  def _fill(self, started: list[tuple[int, int, Request]]) -> dict[int, Text]:
    """Reads prompts into rows and draws the first token of each."""
    count = _padded(len(started), least=1)
    longest = min(_padded(max(len(r.tokens) for _, _, r in started), least=16), self._max_len)
    tokens = np.zeros((count, longest), np.int32)
    positions = np.full((count, longest), -1, np.int32)
    rows = np.full(count, self._num_rows, np.int32)  # Beyond the last: dropped.
    left, seeds = np.zeros(count, np.int32), np.zeros(count, np.uint32)
    for index, (row, _, request) in enumerate(started):
      size = len(request.tokens)
      tokens[index, :size], positions[index, :size] = request.tokens, np.arange(size)
      rows[index], left[index] = row, request.max_new_tokens - 1
      seeds[index] = request.seed % 2**32
    arrays = (tokens, positions, rows, left, seeds)
    self._grow(longest)
    compiled = self._compiled_for(self._prefill, self._params, self._rows, *arrays, donate=(1,))
    progress.enter("decode")
    began = time.perf_counter()
    self._rows, drawn = compiled(self._params, self._rows, *arrays)
    drawn = jax.device_get(drawn)
    self.speed.prefill_seconds += time.perf_counter() - began
    self.speed.prefill_tokens += int((positions >= 0).sum())
    texts = {}
    for index, (row, number, request) in enumerate(started):
      texts[row] = Text(request=number, prompt_length=len(request.tokens))
      self._add(texts[row], drawn[0][index], drawn[1][index], int(left[index]))
    return texts

  def _advance(self, texts: Mapping[int, Text]):
    """Adds up to `steps_per_call` tokens to each text."""
    self._grow(max(text.length for text in texts.values()) + self._steps)
    active = np.zeros(self._num_rows, bool)
    active[list(texts)] = True
    compiled = self._compiled_for(self._decode, self._params, self._rows, active, donate=(1,))
    progress.enter("decode")
    began = time.perf_counter()
    self._rows, drawn = compiled(self._params, self._rows, active)
    tokens, log_probabilities, left = jax.device_get(drawn)
    self.speed.decode_seconds += time.perf_counter() - began
    for row, text in texts.items():
      before = len(text.tokens)
      for step in range(self._steps):
        if text.ended_by is None:
          self._add(text, tokens[step, row], log_probabilities[step, row], int(left[step, row]))
      self.speed.decode_tokens += len(text.tokens) - before

  def _start(self):
    """Makes all rows free, and the caches small."""
    self._room = min(_LEAST_ROOM, self._max_len)
    self._rows = self._compiled_for(self._empty)()

  def _grow(self, needed: int):
    """Makes room in the caches for texts of so many tokens."""
    room = _padded(needed, least=_LEAST_ROOM)
    room = min(room * 3 // 4 if needed <= room * 3 // 4 else room, self._max_len)
    if room > self._room:
      self._room = room
      self._rows = self._compiled_for(self._grown, self._rows)(self._rows)

  def _add(self, text: Text, token: np.integer, log_probability: np.floating, left: int):
    if int(token) in self._end_ids:
      text.ended_by = "stop"
      return
    text.tokens.append(int(token))
    text.log_probabilities.append(float(log_probability))
    if left == 0:
      text.ended_by = "length"

  def _compiled_for(self, function: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
    """Returns the program for arguments of these shapes and shardings."""
    leaves = jax.tree.leaves(arguments)
    kinds = tuple((jnp.shape(x), getattr(x, "sharding", None)) for x in leaves)
    key = (function.__name__, self._room, kinds)
    if key not in self._compiled:
      progress.enter("decode_compile")
      lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
      self._compiled[key] = lowered.compile(compiler_options=self._compiler_options)
    return self._compiled[key]

  def _empty(self) -> _Rows:
    zeros = jnp.zeros(self._num_rows, jnp.int32)
    dtype = self._module.embedding.dtype
    caches = self._module.stack.empty_caches(self._num_rows, self._room, dtype)
    keys = jax.random.split(jax.random.key(0), self._num_rows)
    return _Rows(caches, zeros, zeros - 1, zeros, keys)

  def _grown(self, rows: _Rows) -> _Rows:
    caches = self._module.stack.grown_caches(rows.caches, self._room)
    return dataclasses.replace(rows, caches=caches)

  def _prefill(
    self,
    params: Params,
    old: _Rows,
    tokens_PT: jax.Array,
    positions_PT: jax.Array,
    rows_P: jax.Array,
    left_P: jax.Array,
    seeds_P: jax.Array,
  ) -> tuple[_Rows, tuple[jax.Array, jax.Array]]:
    model = self._definition.bind(params, self._definition.rounded(params))
    dtype = model.embedding.dtype
    caches = model.stack.empty_caches(len(tokens_PT), self._room, dtype)
    context = Context(positions_BT=positions_PT)
    x_PTD, caches, _ = model.hidden(tokens_PT, context, caches)
    last_P = positions_PT.max(axis=1)
    x_PD = jnp.take_along_axis(x_PTD, jnp.maximum(last_P, 0)[:, None, None], axis=1)[:, 0]
    keys_P = jax.vmap(jax.random.key)(seeds_P)
    new_P, log_probabilities_P = self._draw(model, x_PD, keys_P, last_P)

    def put(whole: jax.Array, part: jax.Array, axis: int = 0) -> jax.Array:
      index = (slice(None),) * axis + (rows_P,)
      return whole.at[index].set(part, mode="drop")

    stacked = {
      name: jax.tree.map(lambda w, p, a=int(name == "pattern"): put(w, p, a), old.caches[name], new)
      for name, new in caches.items()
    }
    rows = _Rows(
      stacked,
      put(old.tokens_B, new_P),
      put(old.positions_B, last_P + 1),
      put(old.left_B, left_P),
      put(old.keys_B, keys_P),
    )
    return rows, (new_P, log_probabilities_P)

  def _decode(
    self, params: Params, rows: _Rows, active_B: jax.Array
  ) -> tuple[_Rows, tuple[jax.Array, jax.Array, jax.Array]]:
    model = self._definition.bind(params, self._definition.rounded(params))
    ends = jnp.array(self._end_ids, jnp.int32)

    def step(rows: _Rows, unused: None):
      del unused
      context = Context(positions_BT=rows.positions_B[:, None])
      x_B1D, caches, _ = model.hidden(rows.tokens_B[:, None], context, rows.caches)
      tokens_B, log_probabilities_B = self._draw(model, x_B1D[:, 0], rows.keys_B, rows.positions_B)
      left_B = rows.left_B - 1
      ended_B = (left_B <= 0) | jnp.isin(tokens_B, ends) | (rows.positions_B < 0)
      positions_B = jnp.where(ended_B, -1, rows.positions_B + 1)
      rows = _Rows(caches, tokens_B, positions_B, left_B, rows.keys_B)
      return rows, (tokens_B, log_probabilities_B, left_B)

    positions_B = jnp.where(active_B, rows.positions_B, -1)
    rows = dataclasses.replace(rows, positions_B=positions_B)
    return jax.lax.scan(step, rows, length=self._steps)

  def _draw(
    self, model: Any, x_BD: jax.Array, keys_B: jax.Array, positions_B: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    logits_BV = mesh.constrain(model.logits(x_BD), "batch", "vocab")
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    return self._sampling.draw(logits_BV, keys_B)


def _padded(size: int, *, least: int) -> int:
  """Returns the next power of two: there are few of them, so programs are compiled few times."""
  return max(least, 1 << (size - 1).bit_length())


def generate(
  definition: Definition,
  params: Mapping[str, jax.Array],
  prompts: Sequence[np.ndarray],
  *,
  max_new_tokens: int,
  sampling: Sampling | None = None,
  end_ids: Sequence[int] = (),
  num_rows: int | None = None,
  steps_per_call: int = STEPS_PER_CALL,
  seed: int = 0,
) -> list[Text]:
  """Returns the continuation of each prompt, in their order.

  Args:
    definition: A `layers.Decoder`.
    params: Its weights.
    prompts: int32 tokens of each.
    max_new_tokens: At most so many new tokens each.
    sampling: How tokens are chosen; None: the likeliest.
    end_ids: Tokens that end a text.
    num_rows: Texts that are decoded together; None: all.
    steps_per_call: As of `Generator`.
    seed: Of the draws; each prompt has its own after it.
  """
  requests = [
    Request(tokens=tokens, max_new_tokens=max_new_tokens, seed=seed + number)
    for number, tokens in enumerate(prompts)
  ]
  generator = Generator(
    definition,
    params,
    num_rows=num_rows or len(prompts),
    max_len=max((len(tokens) for tokens in prompts), default=0) + max_new_tokens,
    sampling=sampling,
    end_ids=end_ids,
    steps_per_call=steps_per_call,
  )
  texts = {text.request: text for grown in generator.run(requests) for text in grown}
  return [texts[number] for number in sorted(texts)]
