# SPDX-License-Identifier: Apache-2.0
"""A trained model in Python: generation, evaluation, logits, rewards and export."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from etils import epath

from paxlike import file_io, root_graph, run_folder, run_mode
from paxlike.api import error_messages
from paxlike.cli import error_diagnosis, flags, startup
from paxlike.config import knob_text
from paxlike.errors import UserError
from paxlike.processes import work_report

if TYPE_CHECKING:
  from paxlike.api.adapters import Adapters
  from paxlike.data.chat.prompt_rendering import PromptRenderer
  from paxlike.inference.decoding import Decoding, DecodingOptions
  from paxlike.training.trainer import Trainer


def load(
  folder: str | os.PathLike[str],
  step: "int | Literal['best'] | None" = None,
  *,
  allow_modules: Sequence[str] = (),
  adapters: Mapping[str, str | os.PathLike[str]] | None = None,
  **knobs: Any,
) -> "Model":
  """Returns the model in the folder of a run, of `paxlike-convert`, or in Hugging Face's format.

  A Hugging Face folder is converted when it is first loaded, and again after its files have
  changed, into the folder `converted` of the cache ($PAXLIKE_CACHE).

  Args:
    folder: The folder.
    step: A run's checkpoint; None: the newest; "best": the best by BEST_CHECKPOINT_METRIC.
    allow_modules: Modules outside of paxlike that the run's files may import, such as your
      experiment's, or that register the family of a Hugging Face folder. Name only modules that you
      trust.
    adapters: Name -> folder of a run that trained LoRA adapters of this model, or of a PEFT adapter
      that `paxlike-convert --from=peft` read. `generate` decodes with them.
    **knobs: Overrides of the experiment's knobs, such as DATA_PATH="my.txt" to evaluate on.

  Raises:
    UserError: The folder holds no model, uses modules that are not allowed, or a knob is wrong.
  """
  names = tuple(allow_modules)
  options = flags.Options(mode="eval", knobs=knob_text.pairs(knobs), fdl_allow_modules=names)
  with contextlib.ExitStack() as stack:
    stack.enter_context(error_messages.for_python(folder))
    stack.enter_context(work_report.reporting_failure(leave=False))
    stage = stack.enter_context(error_diagnosis.explained(options, entry=True))
    startup.set_up_jax(options)
    work_report.leave_at_exit()
    path = _run_in(os.fspath(folder), names)
    options = dataclasses.replace(options, job_log_dir=os.fspath(path))
    stage.experiment = root_graph.experiment_if_named(options)
    graph = root_graph.of(options, stage.experiment)
    return Model(path, graph, step=step, allow_modules=names, adapters=adapters)


def _run_in(folder: str, allow_modules: Sequence[str]) -> epath.Path:
  """Returns `folder`, or, if that is in Hugging Face's format, the folder of its conversion."""
  path = run_folder.existing(os.fspath(file_io.absolute(folder)))
  config = path / "config.json"
  with run_folder.reading(config):
    if not config.exists():
      raise UserError(f"{path} holds no model: it has no config.json.")
    data = file_io.read_bytes(config)
  try:
    is_theirs = "model_type" in json.loads(data)
  except file_io.MALFORMED as error:
    raise UserError(f"{config} is damaged: {file_io.reason(error)}.") from error
  if not is_theirs:
    return path
  import jax

  from paxlike.convert import cached

  if jax.process_count() > 1:
    raise UserError(f"{path}: several processes cannot convert it: run paxlike-convert first.")
  return epath.Path(cached.converted(pathlib.Path(path), allow_modules=allow_modules))


class Model:
  """A model with the weights of one checkpoint.

  Attributes:
    folder: The folder of its run.
    step: The checkpoint's step: completed updates.
    tokenizer: The tokenizer of its data; None if they have none.
  """

  def __init__(
    self,
    folder: epath.Path,
    graph: Any,
    *,
    step: "int | Literal['best'] | None" = None,
    allow_modules: Sequence[str] = (),
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
  ):
    """`graph` is the root graph of the run in `folder`; for the rest see `load`.

    Raises:
      UserError: There is no such checkpoint, or it is of another model.
    """
    import jax

    from paxlike import fiddlers
    from paxlike.training import best_checkpoint

    number = best_checkpoint.step_of(folder) if step == "best" else step
    self.folder = folder
    self._graph = graph
    self._allow_modules = tuple(allow_modules)
    decoding = copy.deepcopy(graph)
    fiddlers.decoding(decoding)
    self._decoder: Trainer = run_mode.build_trainer(decoding)
    with jax.set_mesh(self._decoder.devices):
      self.step, self._params = self._decoder.state_source(folder).params(number)
    self.tokenizer: Any = self._decoder.data.tokenizer
    self._decoding: Decoding | None = None
    self._adapters: Adapters | None = None
    if adapters:
      from paxlike.api import adapters as loading

      self._adapters = loading.load(
        decoding, folder, self.step, adapters, allow_modules=self._allow_modules
      )

  def __repr__(self) -> str:
    count = self._decoder.definition.num_params
    return f"<Model {self.folder}, checkpoint {self.step}: {count:,} parameters>"

  @error_messages.for_python()
  def generate(
    self,
    prompts: Any,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    adapters: str | Sequence[str | None] | None = None,
  ) -> Any:
    """Returns the continuation of a prompt, or of each of several: text for text, ids for ids.

    A continuation ends at EOS, before a string of `stop`, after `max_new_tokens`, or at the model's
    maximum sequence length. Text is prefixed with the tokenizer's BOS, if it has one; ids are used
    unchanged. A conversation is rendered by the chat template and answered, as by `--mode=decode`.

    Args:
      prompts: A string, ids, or a conversation, which is `{"messages": messages}` or the messages:
        a list of `{"role": "user", "content": "..."}`. Or a list of one of these kinds.
      max_new_tokens: Maximum number of new tokens.
      temperature: Divides the logits; 0 is greedy.
      top_k: Only the k most likely tokens.
      top_p: Only the most likely tokens with this total probability.
      min_p: Only tokens with this share of the largest probability.
      stop: Strings before which a continuation ends.
      seed: Of the sampling.
      adapters: The adapter of all prompts, or of each, by its name in `load`; None is the base.

    Raises:
      UserError: There is no such adapter; or a prompt is empty, too long or invalid, is text
        without a tokenizer, or a conversation without a chat template.
    """
    import jax

    from paxlike.inference import decoding
    from paxlike.inference.sampling import Sampling
    from paxlike.training import decode_mode

    given, is_one = prompts_of(prompts, vocab_size=self._decoder.model.vocab_size)
    options = decoding.DecodingOptions(
      max_new_tokens=max_new_tokens,
      sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
      stop=(stop,) if isinstance(stop, str) else tuple(stop),
      seed=seed,
    )
    if options.stop and self.tokenizer is None:
      raise UserError(f"stop: {decoding.NO_TOKENIZER}")
    chosen = self._chosen(adapters, len(given))
    found: list[Any] = [None] * len(given)
    prompt_renderer = decode_mode.prompt_renderer_for(self._decoder, given)
    with jax.set_mesh(self._decoder.devices):
      for result in self._decoding_with(options, prompt_renderer).run(given, adapters=chosen):
        prompt = given[result.prompt]
        is_text = isinstance(prompt, str) or decoding.is_conversation(prompt)
        found[result.prompt] = result.text if is_text else result.tokens
    return found[0] if is_one else found

  def _chosen(self, adapters: Any, num_prompts: int) -> list[int] | None:
    """Returns the number of each prompt's adapter; None if the model was loaded without any."""
    if self._adapters is not None:
      return self._adapters.numbers(adapters, num_prompts)
    if adapters is not None:
      raise UserError("adapters: this model has none; name their folders: load(..., adapters=...).")
    return None

  def _decoding_with(
    self, options: "DecodingOptions", prompt_renderer: "PromptRenderer | None"
  ) -> "Decoding":
    """Returns the decoder, reused with its programs while sampling and template are the same."""
    from paxlike.training import decode_mode

    last = self._decoding
    if last is None or (last.options.sampling, last.prompt_renderer) != (
      options.sampling,
      prompt_renderer,
    ):
      trainer, params = self._decoder, self._params
      if self._adapters is not None:
        trainer, params = self._adapters.trainer, params | self._adapters.params
      last = decode_mode.decoding_of(trainer, params, options, prompt_renderer=prompt_renderer)
      self._decoding = last
    last.use(options)
    return last

  @error_messages.for_python()
  def logits(self, tokens: Any) -> np.ndarray:
    """Returns float32 [B, T, V], the logits of the token after each of `tokens`.

    Args:
      tokens: int [B, T], one document per sequence. T is at most the model's MAX_SEQ_LEN.

    Raises:
      UserError: They have another shape, or ids outside of the vocabulary.
    """
    import jax

    tokens_BT = ids_of(tokens, vocab_size=self._decoder.model.vocab_size, what="tokens")
    most = self._decoder.data.seq_len
    if tokens_BT.ndim != 2 or not tokens_BT.size or tokens_BT.shape[1] > most:
      raise UserError(f"tokens are {list(tokens_BT.shape)}: expected [B, T], T at most {most}.")
    with jax.set_mesh(self._decoder.devices):
      return np.asarray(self._forward(self._params, tokens_BT))

  @error_messages.for_python()
  def rewards(self, conversations: Any) -> list[float]:
    """Returns the rewards that a reward model gives conversations.

    Args:
      conversations: Lists of messages, `{"role": "user", "content": "..."}`; the last is the
        answer.

    Raises:
      UserError: This is no reward model, or a conversation is no list of messages or too long.
    """
    import jax

    with jax.set_mesh(self._decoder.devices):
      return self._reward_scorer.rewards(self._params, list(conversations))

  @functools.cached_property
  def _reward_scorer(self) -> Any:
    from paxlike.training.reinforcement.reward_scoring import RewardScorer

    trainer = self._decoder
    return RewardScorer(
      trainer.definition,
      trainer.data,
      trainer.devices,
      batch_size=trainer.devices.size,
      compiler_options=trainer.execution.compiler_options,
    )

  @functools.cached_property
  def _forward(self) -> Any:
    import jax
    import jax.numpy as jnp

    from paxlike.layers import decoder

    definition = self._decoder.definition

    def forward(params: Any, tokens_BT: jax.Array) -> jax.Array:
      logits_BTV, _ = decoder.forward(definition, definition.prepare(params), {"inputs": tokens_BT})
      return logits_BTV.astype(jnp.float32)

    return jax.jit(forward, compiler_options=dict(self._decoder.execution.compiler_options))

  @error_messages.for_python()
  def evaluate(self) -> dict[str, dict[str, float]]:
    """Returns the metrics of each eval set by name, like `--mode=eval`; writes nothing.

    `<metric>_stderr` is a standard error; `num_predictions` and `num_examples` count the evaluated
    tokens and sequences.

    Raises:
      UserError: The experiment has no evaluation data, or its files are missing.
    """
    import jax

    trainer, params = self._evaluator
    evaluators = trainer.evaluators  # Raises if there is no evaluation data.
    trainer.check(training=False)
    with jax.set_mesh(trainer.devices):
      return {name: one.run(params, name=name).values for name, one in evaluators.items()}

  @functools.cached_property
  def _evaluator(self) -> "tuple[Trainer, Any]":
    """The trainer for evaluation and its weights, shared with the decoder if layouts are equal."""
    import jax

    from paxlike.layers.stack import layout_of

    trainer: Trainer = run_mode.build_trainer(self._graph)
    if layout_of(trainer.model) == layout_of(self._decoder.model):
      return trainer, self._params
    with jax.set_mesh(trainer.devices):
      return trainer, trainer.state_source(self.folder).params(self.step)[1]

  def export(
    self,
    folder: str | os.PathLike[str],
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
  ):
    """Writes model and tokenizer to a new folder in Hugging Face's format, like `paxlike-convert`.

    Raises:
      UserError: Hugging Face has no such model, or the folder is not empty.
    """
    from paxlike.convert import exporting

    path = pathlib.Path(self.folder)
    with error_messages.for_python(self.folder):
      source = exporting.ExportedRun(path, step=self.step, allow_modules=self._allow_modules)
      source.convert(pathlib.Path(folder), dtype=dtype)


def prompts_of(prompts: Any, *, vocab_size: int) -> tuple[list[Any], bool]:
  """Returns (list of prompts, whether `prompts` is a single one)."""
  if isinstance(prompts, str | Mapping):
    return [_text_or_talk(prompts, "the prompt")], True
  listed = list(prompts)
  if listed and all(isinstance(one, str) for one in listed):
    return listed, False
  if any(_is_message(one) for one in listed):
    return [_text_or_talk(listed, "the prompt")], True
  if any(isinstance(one, Mapping) or _is_talk(one) for one in listed):
    return [_text_or_talk(one, f"prompt {number}") for number, one in enumerate(listed)], False
  is_one = bool(listed) and np.ndim(listed[0]) == 0
  rows = [listed] if is_one else listed
  return [ids_of(row, vocab_size=vocab_size, what="a prompt").tolist() for row in rows], is_one


def _text_or_talk(prompt: Any, place: str) -> Any:
  """Returns a text, or the messages of a conversation; errors begin with `place`."""
  from paxlike.inference import prompts

  if isinstance(prompt, str):
    return prompt
  record = prompt if isinstance(prompt, Mapping) else {"messages": prompt}
  return prompts.conversation(record, place)


def _is_message(prompt: Any) -> bool:
  return isinstance(prompt, Mapping) and ("role" in prompt or "content" in prompt)


def _is_talk(prompt: Any) -> bool:
  return isinstance(prompt, list | tuple) and any(isinstance(one, Mapping) for one in prompt)


def ids_of(tokens: Any, *, vocab_size: int, what: str) -> np.ndarray:
  """Returns ids as an array of int32.

  Raises:
    UserError: They are not ids of the vocabulary.
  """
  try:
    array = np.asarray(tokens)
  except ValueError as error:
    raise UserError(f"{what}: expected ids of one length, got {tokens!r:.100}.") from error
  if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= vocab_size):
    raise UserError(f"{what}: expected ids from 0 to {vocab_size - 1}, got {tokens!r:.100}.")
  return array.astype(np.int32)
