# SPDX-License-Identifier: Apache-2.0
"""A conversation in the terminal: the user's lines, and the model's answers, streamed."""

import sys
from collections.abc import Callable, Iterator

import jax

from paxlike.data.chat.openai_messages import Message
from paxlike.errors import UserError
from paxlike.inference.decoding import Decoding, stream
from paxlike.processes import phases

HELP = "Each line is a message. /reset forgets the conversation; Ctrl-D ends it."
_PROMPT = "> "
EXAMPLE: list[list[Message]] = [[{"role": "user", "content": "Hello"}]]


def check():
  """Raises a UserError if there are several processes, which cannot share a terminal."""
  if jax.process_count() > 1:
    raise UserError("--chat is for one process: start only one.")


def converse(decoding: Decoding, show: Callable[[str], object], lines: Iterator[str] | None = None):
  """Answers each line until the lines end.

  Args:
    decoding: A decoder with a prompt renderer.
    show: Prints a piece of text.
    lines: The user's lines; None: standard input.
  """
  show(f"{HELP}\n")
  said: list[Message] = []
  for line in _typed(show) if lines is None else lines:
    if line.strip() == "/reset":
      said = []
      show("(a new conversation)\n")
      continue
    if not line.strip():
      continue
    talk = [*said, {"role": "user", "content": line}]
    try:
      answer = stream(decoding.run([talk], at_full_length=True), decoding.options, show)
    except UserError as error:
      show(f"{error} /reset begins a new conversation.\n")
      continue
    show("\n")
    said = [*talk, {"role": "assistant", "content": answer.strip()}]
  show("\n")


def _typed(show: Callable[[str], object]) -> Iterator[str]:
  """Yields lines of standard input until it ends."""
  while True:
    phases.enter("listen")
    show(_PROMPT)
    line = sys.stdin.readline()
    if not line:
      return
    yield line.rstrip("\n")
