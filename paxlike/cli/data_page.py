# SPDX-License-Identifier: Apache-2.0
"""The text of `paxlike-data show`: sequences token by token, with their loss, and a summary."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlike.data.dataset import Arrays, Dataset
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.data.tuning.prompts import Prompts

BEGIN, END = "⟦", "⟧"  # Around tokens with loss, without colours.
_CONTEXT = 16  # Tokens before one that decide how it is decoded.
_MOST_TOKENS_OF_A_CHARACTER = 4
_FIELD_CHARACTERS = 500
_LOSS, _NO_LOSS, _SPECIAL, _HEAD, _PLAIN = (
  f"\x1b[{code}m" for code in ("1;32", "2", "4", "1", "0")
)


class Segment(NamedTuple):
  """The tokens of a segment.

  Attributes:
    number: Its number in the sequence, from 1.
    ids: int [n].
    has_loss: bool [n]; the first token is only an input.
  """

  number: int
  ids: np.ndarray
  has_loss: np.ndarray


class Piece(NamedTuple):
  """The text of one or a few tokens that are decoded together."""

  text: str
  has_loss: bool
  is_special: bool


def segments_of(arrays: Mapping[str, np.ndarray]) -> list[Segment]:
  """Returns the segments of one sequence of a batch, arrays [T]."""
  inputs, targets, weights = (arrays[name] for name in ("inputs", "targets", "weights"))
  numbers = arrays.get("segments")
  if numbers is None:
    used = np.flatnonzero((inputs != 0) | (targets != 0) | (weights > 0))
    numbers = np.arange(len(inputs)) < (used[-1] + 1 if len(used) else 0)
  found = []
  bounds = np.flatnonzero(np.diff(np.concatenate([[0], numbers, [0]])))
  for begin, end in zip(bounds, [*bounds[1:], len(inputs)], strict=True):
    if begin == len(inputs) or not numbers[begin]:
      continue
    ids = np.append(inputs[begin:end], targets[end - 1])
    has_loss = np.append(False, weights[begin:end] > 0)
    following = inputs[end] if end < len(inputs) else None
    if not has_loss[-1] and following == ids[-1]:
      # The target of the last position is the first token of the next document, or padding.
      ids, has_loss = ids[:-1], has_loss[:-1]
    found.append(Segment(int(numbers[begin]), ids, has_loss))
  return found


def pieces(segment: Segment, tokenizer: Tokenizer | None) -> Iterator[Piece]:
  """Yields the texts of a segment's tokens; a character of several tokens is one piece."""
  ids, pending = segment.ids, 0
  for at in range(len(ids)):
    has_loss = bool(segment.has_loss[at])
    first = at - pending
    if tokenizer is None:
      yield Piece(f"{ids[at]} ", has_loss, False)
      continue
    before = ids[max(first - _CONTEXT, 0) : first]
    text = tokenizer.continuation(before, ids[first : at + 1].tolist())
    ends = at + 1 == len(ids) or segment.has_loss[at + 1] != has_loss
    if text.endswith("\ufffd") and not ends and pending + 1 < _MOST_TOKENS_OF_A_CHARACTER:
      pending += 1
      continue
    pending = 0
    is_special = not text
    yield Piece(text or _name(int(ids[at]), tokenizer), has_loss, is_special)


def _name(number: int, tokenizer: Tokenizer) -> str:
  """Returns the text of a token that is decoded to none."""
  role = {tokenizer.eos_id: "EOS", tokenizer.bos_id: "BOS"}.get(number, str(number))
  return tokenizer.text_of(number) or f"<{role}>"


@dataclasses.dataclass(frozen=True)
class Page:
  """Prints data.

  Attributes:
    color: Whether loss is shown by colours; otherwise by `BEGIN` and `END`.
  """

  color: bool

  def legend(self) -> str:
    """Returns what the marks mean."""
    how = (
      f"{_LOSS}in green{_PLAIN}, others dimmed, special tokens underlined"
      if self.color
      else f"in {BEGIN}brackets{END}"
    )
    return f"Tokens with loss are {how}; control characters are escaped."

  def sequence(self, arrays: Mapping[str, np.ndarray], dataset: Dataset, *, title: str) -> str:
    """Returns a sequence, arrays [T], with a title and a heading for each segment."""
    segments = segments_of(arrays)
    length, loss = (int(sizes.sum()) for sizes in _sizes(arrays))
    facts = [
      f"{length} of {len(arrays['inputs'])} positions",
      f"{loss} with loss ({_share(loss, length)})",
      _counted(len(segments), "segment") if "segments" in arrays else "",
      f"of {dataset.sources[int(arrays['source'][0])]}" if "source" in arrays else "",
    ]
    lines = [self._head(f"{title}: {', '.join(filter(None, facts))}")]
    for segment in segments:
      if "segments" in arrays:
        names = dict(enumerate(dataset.segment_names, 1))
        name = names.get(segment.number, f"segment {segment.number}")
        counts = f"{_counted(len(segment.ids), 'token')}, {segment.has_loss.sum()} with loss"
        lines.append(self._head(f"--- {name}: {counts}"))
      lines.append(self._painted(pieces(segment, dataset.tokenizer)))
    return "\n".join(lines)

  def prompt(self, ids: np.ndarray, dataset: Prompts, number: int, *, title: str) -> str:
    """Returns a prompt, int [P] padded with -1, and the other fields of its record."""
    ids = ids[ids >= 0]
    segment = Segment(1, ids, np.zeros(len(ids), bool))
    lines = [self._head(f"{title}: {len(ids)} of {dataset.max_tokens} tokens")]
    lines.append(self._painted(pieces(segment, dataset.tokenizer)))
    for name, value in dataset.record(number).items():
      if name != dataset.field:
        text = json.dumps(value, ensure_ascii=False)
        cut = f"{text[:_FIELD_CHARACTERS]}..." if len(text) > _FIELD_CHARACTERS else text
        lines.append(self._head(f"--- {self._clean(name)}: ") + self._clean(cut))
    return "\n".join(lines)

  def _head(self, text: str) -> str:
    return f"{_HEAD}{text}{_PLAIN}" if self.color else text

  def _clean(self, text: str) -> str:
    """Escapes what would control a terminal or look like a mark."""
    marks = "" if self.color else BEGIN + END
    return "".join(
      char
      if (char.isprintable() or char in "\n\t") and char not in marks
      else char.encode("unicode_escape").decode()
      for char in text
    )

  def _painted(self, found: Iterable[Piece]) -> str:
    text = ""
    by_style = itertools.groupby(found, lambda one: (one.has_loss, self.color and one.is_special))
    for (has_loss, is_special), run in by_style:
      clean = self._clean("".join(piece.text for piece in run))
      if self.color:
        style = (_LOSS if has_loss else _NO_LOSS) + (_SPECIAL if is_special else "")
        # Each line by itself, so that a pager keeps the style.
        text += "\n".join(f"{style}{line}{_PLAIN}" if line else "" for line in clean.split("\n"))
      else:
        text += f"{BEGIN}{clean}{END}" if has_loss else clean
    return text


def _counted(number: int, what: str) -> str:
  return f"{number} {what}{'' if number == 1 else 's'}"


def _sizes(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the positions that are no padding, and those with loss, of each sequence [..., T]."""
  has_loss = arrays["weights"] > 0
  if "segments" in arrays:
    used = arrays["segments"] > 0
  else:
    there = (arrays["inputs"] != 0) | (arrays["targets"] != 0) | has_loss
    used = np.flip(np.maximum.accumulate(np.flip(there, -1), -1), -1)
  return used.sum(-1), has_loss.sum(-1)


def _share(part: int | float, whole: int | float) -> str:
  return f"{part / whole:.1%}" if whole else "0%"


class Summary:
  """Sums over sequences."""

  def __init__(self):
    self._lengths: list[int] = []
    self._losses: list[int] = []
    self._segments: list[int] = []
    self._positions = 0

  def add(self, arrays: Arrays):
    """Counts sequences, arrays [n, T], or prompts."""
    if "prompts" in arrays:
      self._lengths += (arrays["prompts"] >= 0).sum(-1).tolist()
      return
    lengths, losses = _sizes(arrays)
    self._lengths += lengths.tolist()
    self._losses += losses.tolist()
    self._positions += arrays["inputs"].size
    for row in arrays.get("segments", ()):
      # The segments of a sequence are numbered from 1, without gaps.
      self._segments += np.bincount(row[row > 0])[1:].tolist()

  def text(self, dataset: Dataset, *, kind: str) -> str:
    """Returns the summary; `kind` names what was counted."""
    count = len(self._lengths)
    lines = [f"{count} {kind}", f"  lengths in tokens: {_spread(self._lengths)}"]
    if self._segments:
      lines.append(
        f"  segments: {len(self._segments) / count:.1f} in a sequence, lengths"
        f" {_spread(self._segments)}"
      )
    if self._positions:
      used = sum(self._lengths)
      lines += [
        f"  with loss: {_share(sum(self._losses), used)} of the tokens",
        f"  padding: {_share(self._positions - used, self._positions)} of the positions",
      ]
      if without := self._losses.count(0):
        lines.append(f"  without loss: {without} sequences")
    if (truncated := dataset.truncated) is not None:
      lines.append(
        f"  truncated: {truncated[0]} examples of an epoch, {truncated[1]} of them without loss"
      )
    return "\n".join(lines)


def _spread(values: Sequence[Any]) -> str:
  if not values:
    return "none"
  return f"min {min(values)}, median {np.median(values):g}, max {max(values)}"
