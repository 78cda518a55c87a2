# SPDX-License-Identifier: Apache-2.0
"""The interface of corpora: documents as token ids, however they are then cut into rows."""

import abc

from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizer import Tokenizer


class Corpus(abc.ABC):
  """Documents as token ids."""

  @property
  def tokenizer(self) -> Tokenizer | None:
    """Turns text into the ids, and back; None where that is not known."""
    return None

  def check(self):  # noqa: B027 - a corpus without files has nothing to check.
    """Finds what is wrong, as far as that is cheap; writes nothing.

    Raises:
      UserError: A path is missing, say.
    """

  @abc.abstractmethod
  def index(self) -> TokenIndex:
    """Returns the documents; may take long the first time."""
