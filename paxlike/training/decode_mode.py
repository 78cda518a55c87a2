# SPDX-License-Identifier: Apache-2.0
"""Decoding with a trainer's model: of prompts, or as a conversation in the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.inference import conversation, decoding
from paxlike.layers.module import Params
from paxlike.telemetry.run_log import RunLog

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer


def check(
  trainer: "Trainer", prompts: Sequence[decoding.Prompt], *, stop_tokens: Sequence[int] = ()
):
  """Checks that the model can continue `prompts`, and that `stop_tokens` are in its vocabulary.

  Raises:
    UserError: A prompt cannot be continued, or a stop token is not in the vocabulary.
  """
  how: Any = {"max_len": trainer.data.seq_len, "stop_tokens": stop_tokens}
  tokenizer, renderer = trainer.data.tokenizer, prompt_renderer_for(trainer, prompts)
  decoding.check(prompts, trainer.model, tokenizer, renderer, **how)


def run(
  trainer: "Trainer",
  folder: epath.Path,
  run_log: RunLog,
  prompts: Sequence[decoding.Prompt],
  *,
  step: int | None,
  options: decoding.DecodingOptions,
):
  """Continues `prompts` with checkpoint `step`, or the newest, and prints and saves the texts.

  Without prompts, holds a conversation in the terminal.

  Raises:
    UserError: There is no such checkpoint, it is of another experiment, or has no tokenizer.
  """
  if not prompts:
    conversation.check()
  check(trainer, prompts or conversation.EXAMPLE, stop_tokens=options.stop_tokens)
  with jax.set_mesh(trainer.devices), trainer.watched(folder):
    step, params = trainer.state_source(folder).params(step)
    renderer = prompt_renderer_for(trainer, prompts or conversation.EXAMPLE)
    decoder = decoding_of(trainer, params, options, prompt_renderer=renderer)
    if not prompts:
      conversation.converse(decoder, run_log.piece)
      return
    path = folder / "decode_out" / f"decode_{step:08d}.jsonl"
    decoding.write_continuations(decoder, prompts, run_log, path)


def decoding_of(
  trainer: "Trainer",
  params: Params,
  options: decoding.DecodingOptions,
  *,
  prompt_renderer: PromptRenderer | None = None,
) -> decoding.Decoding:
  """Returns a decoder of the trainer's model with weights `params`."""
  return decoding.Decoding(
    trainer.definition,
    params,
    trainer.data.tokenizer,
    max_len=trainer.data.seq_len,
    options=options,
    prompt_renderer=prompt_renderer,
    compiler_options=trainer.execution.compiler_options,
  )


def prompt_renderer_for(
  trainer: "Trainer", prompts: Sequence[decoding.Prompt]
) -> PromptRenderer | None:
  """Returns the renderer of conversations: the data's chat template, else the tokenizer's."""
  if trainer.data.prompt_renderer or not any(map(decoding.is_conversation, prompts)):
    return trainer.data.prompt_renderer
  return trainer.tokenizer_prompt_renderer
