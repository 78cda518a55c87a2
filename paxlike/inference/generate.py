# SPDX-License-Identifier: Apache-2.0
"""Decoding with a KV cache and continuous batching (Yu et al., 2022).

A fixed number of decode slots is decoded together. When a slot's text has ended, the next prompt
takes the slot, so that the longest text does not determine throughput.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.devices import mesh, xla_flags
from paxlike.inference.request import GeneratedText, Request
from paxlike.inference.sampling import Sampling
from paxlike.inference.waiting import WaitingTexts
from paxlike.layers.call_context import Context
from paxlike.layers.module import Definition, Params
from paxlike.processes import phases
from paxlike.processes.host_collectives import fetched

STEPS_PER_CALL = 16
# Initial length of the KV caches in tokens.
_LEAST_ROOM = 64


@dataclasses.dataclass
class Speed:
  """Tokens and seconds of prefill and decode, without compilation."""

  prefill_tokens: int = 0
  prefill_seconds: float = 0.0
  decode_tokens: int = 0
  decode_seconds: float = 0.0

  @property
  def prefill_rate(self) -> float:
    """Prompt tokens per second."""
    return self.prefill_tokens / max(self.prefill_seconds, 1e-9)

  @property
  def decode_rate(self) -> float:
    """New tokens per second, of all slots together."""
    return self.decode_tokens / max(self.decode_seconds, 1e-9)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slots:
  """The state of all decode slots; a free slot has position -1.

  Attributes:
    caches: KV caches of the tokens before the last.
    tokens_B: The last token, not yet cached.
    positions_B: Its position.
    left_B: Number of tokens that may still follow it.
    keys_B: Sampling key of each slot, folded with the position.
    adapters_B: See `Context`.
  """

  caches: Any
  tokens_B: jax.Array
  positions_B: jax.Array
  left_B: jax.Array
  keys_B: jax.Array
  adapters_B: jax.Array


class Generator:
  """Continues prompts with one model.

  Attributes:
    speed: Totals of all calls.
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
    phase: str = "decode",
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """Allocates short KV caches, which grow with the longest text.

    Args:
      definition: A `layers.Decoder`; an unrolled one is faster.
      params: Its weights.
      num_rows: Number of decode slots.
      max_len: Tokens of the longest text, including its prompt.
      sampling: How tokens are sampled; None: greedy.
      end_ids: Tokens that end a text.
      steps_per_call: Tokens per slot and program call. More reduces host overhead, but a finished
        slot idles longer.
      phase: The phase of the process while it decodes; see `phases.KINDS`.
      compiler_options: XLA's; they override those of `xla_flags.prefill_options`.
    """
    phases.enter("decode_compile")
    self.speed = Speed()
    self._definition = definition
    self._module: Any = definition.module
    self._switch = self._module.rope_switch
    self._compiler_options = dict(compiler_options or {})
    self._prepare = jax.jit(definition.prepare, compiler_options=self._compiler_options)
    self.load(params)
    self._num_rows = num_rows
    self._max_len = max_len
    self._sampling = sampling or Sampling()
    self._end_ids = tuple(end_ids)
    self._steps = steps_per_call
    self._phase = phase
    self._compiled: dict[Any, Any] = {}
    self._start()

  def load(self, params: Mapping[str, jax.Array]):
    """Sets the weights of the next `run`."""
    self._params: Params = self._prepare(dict(params))

  def run(self, requests: Iterable[Request]) -> Iterator[list[GeneratedText]]:
    """Yields the texts that have grown, after each call; a finished one has `ended_by` set.

    Raises:
      UserError: A prompt is empty, or exceeds `max_len` with its new tokens.
    """
    waiting = WaitingTexts(requests, max_len=self._max_len, switch=self._switch)
    texts: dict[int, GeneratedText] = {}
    self._start()
    while waiting or texts:
      free = [slot for slot in range(self._num_rows) if slot not in texts]
      started = zip(free, waiting.pop(len(free)), strict=False)
      grown = self._fill([(slot, *one) for slot, one in started])
      texts |= grown
      open_slots = {slot: text for slot, text in texts.items() if text.ended_by is None}
      if open_slots:
        self._advance(open_slots)
        grown |= open_slots
      again = waiting.reopened(grown.values())
      yield list(grown.values())
      waiting.put_back(again)
      numbers = {text.request for text in again}
      texts = {
        slot: text
        for slot, text in texts.items()
        if text.ended_by is None and text.request not in numbers
      }

  def _fill(self, started: list[tuple[int, Request, GeneratedText]]) -> dict[int, GeneratedText]:
    """Prefills slots with prompts and samples the first token of each."""
    if not started:
      return {}
    count = _padded(len(started), least=1)
    longest = min(_padded(max(len(r.tokens) for _, r, _ in started), least=16), self._max_len)
    tokens = np.zeros((count, longest), np.int32)
    positions = np.full((count, longest), -1, np.int32)
    slots = np.full(count, self._num_rows, np.int32)  # Out of bounds: padding is dropped.
    left, seeds = np.zeros(count, np.int32), np.zeros(count, np.uint32)
    adapters = np.full(count, -1, np.int32)
    for index, (slot, request, _) in enumerate(started):
      size = len(request.tokens)
      tokens[index, :size], positions[index, :size] = request.tokens, np.arange(size)
      slots[index], left[index] = slot, request.max_new_tokens - 1
      seeds[index], adapters[index] = request.seed % 2**32, request.adapter
    arrays = (tokens, positions, slots, left, seeds, adapters)
    self._grow(longest)
    given, options = (self._params, self._slots, *arrays), xla_flags.prefill_options()
    compiled = self._compiled_for(self._prefill, *given, donate=(1,), options=options)
    phases.enter(self._phase)
    began = time.perf_counter()
    self._slots, drawn = compiled(*given)
    drawn = fetched(drawn)
    self.speed.prefill_seconds += time.perf_counter() - began
    self.speed.prefill_tokens += int((positions >= 0).sum())
    texts = {}
    for index, (slot, _, text) in enumerate(started):
      texts[slot] = text
      self._add(texts[slot], drawn[0][index], drawn[1][index], int(left[index]))
    return texts

  def _advance(self, texts: Mapping[int, GeneratedText]):
    """Adds up to `steps_per_call` tokens to each text."""
    self._grow(max(text.length for text in texts.values()) + self._steps)
    active = np.zeros(self._num_rows, bool)
    active[list(texts)] = True
    compiled = self._compiled_for(self._decode, self._params, self._slots, active, donate=(1,))
    phases.enter(self._phase)
    began = time.perf_counter()
    self._slots, drawn = compiled(self._params, self._slots, active)
    tokens, log_probabilities, left = fetched(drawn)
    self.speed.decode_seconds += time.perf_counter() - began
    for slot, text in texts.items():
      before = len(text.tokens)
      for step in range(self._steps):
        if text.ended_by is None:
          self._add(text, tokens[step, slot], log_probabilities[step, slot], int(left[step, slot]))
      self.speed.decode_tokens += len(text.tokens) - before

  def _start(self):
    """Frees all slots and allocates short caches."""
    self._room = min(_LEAST_ROOM, self._max_len)
    self._slots = self._compiled_for(self._empty)()

  def _grow(self, needed: int):
    """Grows the caches to hold texts of `needed` tokens."""
    room = _padded(needed, least=_LEAST_ROOM)
    room = min(room * 3 // 4 if needed <= room * 3 // 4 else room, self._max_len)
    if room > self._room:
      self._room = room
      self._slots = self._compiled_for(self._grown, self._slots)(self._slots)

  def _add(self, text: GeneratedText, token: np.integer, log_probability: np.floating, left: int):
    if int(token) in self._end_ids:
      text.end = int(token), float(log_probability)
      text.ended_by = "stop"
      return
    text.tokens.append(int(token))
    text.log_probabilities.append(float(log_probability))
    if left == 0:
      text.ended_by = "length"

  def _compiled_for(
    self,
    function: Any,
    *arguments: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
  ) -> Any:
    """Returns the compiled program for arguments of these shapes and shardings."""
    leaves = jax.tree.leaves(arguments)
    kinds = tuple((jnp.shape(x), getattr(x, "sharding", None)) for x in leaves)
    key = (function.__name__, self._room, kinds)
    if key not in self._compiled:
      phases.enter("decode_compile")
      lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
      options = dict(options or {}) | self._compiler_options
      self._compiled[key] = lowered.compile(compiler_options=options)
    return self._compiled[key]

  def _empty(self) -> _Slots:
    zeros = jnp.zeros(self._num_rows, jnp.int32)
    dtype = self._module.embedding.dtype
    caches = self._module.stack.empty_caches(self._num_rows, self._room, dtype)
    keys = jax.random.split(jax.random.key(0), self._num_rows)
    return _Slots(caches, zeros, zeros - 1, zeros, keys, zeros - 1)

  def _grown(self, slots: _Slots) -> _Slots:
    caches = self._module.stack.grown_caches(slots.caches, self._room)
    return dataclasses.replace(slots, caches=caches)

  def _prefill(
    self,
    params: Params,
    old: _Slots,
    tokens_PT: jax.Array,
    positions_PT: jax.Array,
    slots_P: jax.Array,
    left_P: jax.Array,
    seeds_P: jax.Array,
    adapters_P: jax.Array,
  ) -> tuple[_Slots, tuple[jax.Array, jax.Array]]:
    model = self._definition.bind(params, self._definition.quantize_operands(params))
    dtype = model.embedding.dtype
    caches = model.stack.empty_caches(len(tokens_PT), self._room, dtype)
    context = Context(positions_BT=positions_PT, adapters_B=adapters_P)
    x_PTD, caches, _ = model.hidden(tokens_PT, context, caches)
    last_P = positions_PT.max(axis=1)
    x_PD = jnp.take_along_axis(x_PTD, jnp.maximum(last_P, 0)[:, None, None], axis=1)[:, 0]
    keys_P = jax.vmap(jax.random.key)(seeds_P)
    new_P, log_probabilities_P = self._draw(model, x_PD, keys_P, last_P)

    def put(whole: jax.Array, part: jax.Array, axis: int = 0) -> jax.Array:
      index = (slice(None),) * axis + (slots_P,)
      return whole.at[index].set(part, mode="drop")

    stacked = {
      name: jax.tree.map(lambda w, p, a=int(name == "pattern"): put(w, p, a), old.caches[name], new)
      for name, new in caches.items()
    }
    slots = _Slots(
      stacked,
      put(old.tokens_B, new_P),
      put(old.positions_B, last_P + 1),
      put(old.left_B, left_P),
      put(old.keys_B, keys_P),
      put(old.adapters_B, adapters_P),
    )
    return slots, (new_P, log_probabilities_P)

  def _decode(
    self, params: Params, slots: _Slots, active_B: jax.Array
  ) -> tuple[_Slots, tuple[jax.Array, jax.Array, jax.Array]]:
    model = self._definition.bind(params, self._definition.quantize_operands(params))
    ends = jnp.array(self._end_ids, jnp.int32)

    def step(slots: _Slots, unused: None):
      del unused
      context = Context(positions_BT=slots.positions_B[:, None], adapters_B=slots.adapters_B)
      x_B1D, caches, _ = model.hidden(slots.tokens_B[:, None], context, slots.caches)
      tokens_B, log_probabilities_B = self._draw(
        model, x_B1D[:, 0], slots.keys_B, slots.positions_B
      )
      left_B = slots.left_B - 1
      ended_B = (left_B <= 0) | jnp.isin(tokens_B, ends) | (slots.positions_B < 0)
      positions_B = jnp.where(ended_B, -1, slots.positions_B + 1)
      slots = dataclasses.replace(
        slots, caches=caches, tokens_B=tokens_B, positions_B=positions_B, left_B=left_B
      )
      return slots, (tokens_B, log_probabilities_B, left_B)

    positions_B = jnp.where(active_B, slots.positions_B, -1)
    slots = dataclasses.replace(slots, positions_B=positions_B)
    return jax.lax.scan(step, slots, length=self._steps)

  def _draw(
    self, model: Any, x_BD: jax.Array, keys_B: jax.Array, positions_B: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    logits_BV = mesh.constrain(model.logits(x_BD), "batch", "vocab")
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    return self._sampling.draw(logits_BV, keys_B)


def _padded(size: int, *, least: int) -> int:
  """Returns the next power of two, so that few programs are compiled."""
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
) -> list[GeneratedText]:
  """Returns the continuation of each prompt, in order.

  Args:
    definition: A `layers.Decoder`.
    params: Its weights.
    prompts: int32 tokens of each.
    max_new_tokens: At most this many new tokens each.
    sampling: How tokens are sampled; None: greedy.
    end_ids: Tokens that end a text.
    num_rows: Number of decode slots; None: one per prompt.
    steps_per_call: See `Generator`.
    seed: Of the first prompt; prompt i uses seed + i.
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
