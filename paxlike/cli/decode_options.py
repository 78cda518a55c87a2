# SPDX-License-Identifier: Apache-2.0
"""The prompts and options of decoding, from the command line."""

from typing import Any

from paxlike.cli import flags
from paxlike.inference import decoding, prompts
from paxlike.inference.sampling import Sampling


def read(options: flags.Options) -> tuple[list[decoding.Prompt], decoding.DecodingOptions]:
  """Returns the prompts and the decoding options.

  Raises:
    UserError: A prompt file cannot be read.
  """

  def given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

  limits = given(top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
  how = decoding.DecodingOptions(
    sampling=Sampling(**given(temperature=options.temperature), **limits),
    stop=options.stop,
    stop_tokens=options.stop_token,
    **given(
      max_new_tokens=options.max_new_tokens,
      num_samples=options.num_samples,
      num_rows=options.decode_rows,
      seed=options.decode_seed,
    ),
  )
  texts = [text for name in options.prompt_file for text in prompts.read(name)]
  return [*options.prompt, *texts], how
