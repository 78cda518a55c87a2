# SPDX-License-Identifier: Apache-2.0
"""Special tokens and processing steps that classes of transformers add to `tokenizer.json`.

The class is the `tokenizer_class` of the settings. All else in `tokenizer.json` is used unchanged,
because the model was trained with it.
"""

from collections.abc import Mapping
from typing import Any

from paxlike import untrusted_files
from paxlike.data.tokenizers.token_settings import TOKENIZER_BYTES, TokenSettings

_END = "<|endoftext|>"
# Class -> role -> text, for roles that the settings do not specify.
_TOKENS: Mapping[str, Mapping[str, str]] = {
  "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
  "GemmaTokenizer": {
    "unk_token": "<unk>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
  },
  "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
  "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
}


def tokens(settings: TokenSettings) -> Mapping[str, str]:
  """Returns role -> text of the class's default tokens.

  Raises:
    UserError: The tokenizer's file cannot be read.
  """
  name = settings.tokenizer_class
  # Transformers ignores LlamaTokenizer if the file holds a byte-level tokenizer.
  is_other = (
    name == "LlamaTokenizer"
    and untrusted_files.is_there(settings.file)
    and b'"ByteLevel"' in untrusted_files.read(settings.file, limit=TOKENIZER_BYTES)
  )
  return {} if is_other else _TOKENS.get(name, {})


def apply(model: Any, settings: TokenSettings):
  """Applies the class's normalization and prefix space to a `tokenizers.Tokenizer`."""
  from tokenizers import normalizers, pre_tokenizers

  name = settings.tokenizer_class
  if name == "Qwen2Tokenizer" and model.normalizer is None:
    model.normalizer = normalizers.NFC()
  if name in ("GPT2Tokenizer", "Qwen2Tokenizer") and settings.adds_prefix_space:
    step = model.pre_tokenizer
    for one in step if isinstance(step, pre_tokenizers.Sequence) else (step,):
      if isinstance(one, pre_tokenizers.ByteLevel):
        one.add_prefix_space = True
