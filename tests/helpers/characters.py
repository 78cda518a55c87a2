# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of characters, with a first and a last token."""

import string

from paxlike.data.tokenizers.tokenizer import CharacterTokenizer

CHARACTERS = string.ascii_letters + string.digits + " .,;"
BOS, EOS = len(CHARACTERS), len(CHARACTERS) + 1


class Tokenizer(CharacterTokenizer):
  bos_id, eos_id = BOS, EOS

  def __init__(self):
    super().__init__(CHARACTERS)
    self.vocab_size = 96  # All that the model may say.

  def decode(self, ids):
    return "".join(self.alphabet[i] if i < len(self.alphabet) else "?" for i in ids if i < BOS)
