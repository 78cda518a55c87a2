# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ and the README: their fenced blocks, the commands in them, and what runs.

A comment on the line before a fence says what a test does with the block: `<!-- run -->` runs it,
`<!-- run tiny -->` runs it with TINY added to every command that names an experiment,
`<!-- run small -->` with SMALL, and `<!-- run write: my_model.py -->` writes it to a file. The
blocks of a page share a folder.

    PYTHONPATH=.:tests python -m helpers.pages

prints how many commands each page holds and how many are run.
"""

import pathlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

from helpers import warm_python
from helpers.sources import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted(
  page
  for page in (*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md"))
  if page.parent != DOCS / "reference"
)
# The commands of the package -> module:function.
SCRIPTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]

SMALL = (
  *("NUM_LAYERS=2", "MODEL_DIMS=32", "HIDDEN_DIMS=64", "NUM_HEADS=2", "DIMS_PER_HEAD=16"),
  *("MAX_SEQ_LEN=32", "FPROP_DTYPE=float32"),
)
TINY = (*SMALL, "MAX_STEPS=2", "EVAL_INTERVAL_STEPS=0")
_FENCE = re.compile(
  r"(?:^<!-- run(?P<how>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_NAMED = re.compile(r"[A-Za-z_]\w*=")
_SEPARATORS = {";", "&", "&&", "|", "||", "do", "then", ";;"}


class Block(NamedTuple):
  """A fenced block.

  Attributes:
    language: What stands after the fence.
    text: Its lines.
    run: Whether a test runs it.
    knobs: What is added to its commands.
    file: The file that it is written to; None: it is executed.
  """

  language: str
  text: str
  run: bool
  knobs: tuple[str, ...]
  file: str | None

  @property
  def commands(self) -> list[list[str]]:
    """The words of each command of a block for a shell, without what is set before it."""
    if self.language not in ("bash", "sh"):
      return []
    return list(_commands(self.text))


def blocks(page: pathlib.Path) -> list[Block]:
  """Returns the fenced blocks of a page."""
  found = []
  for match in _FENCE.finditer(page.read_text()):
    how = match["how"]
    file = re.search(r"write: (\S+)", how or "")
    knobs = TINY if "tiny" in (how or "") else SMALL if "small" in (how or "") else ()
    name = None if file is None else file[1]
    found.append(Block(match["language"], match["text"], how is not None, knobs, name))
  return found


def _commands(text: str) -> Iterator[list[str]]:
  for line in text.replace("\\\n", " ").splitlines():
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
      if word in _SEPARATORS:
        while words and _NAMED.match(words[0]):
          words.pop(0)
        if words:
          yield words
        words = []
      else:
        words.append(word)


def outside(page: pathlib.Path) -> str:
  """Returns a page without its fenced blocks; of tables of other programs, our column alone."""
  text = _FENCE.sub("", page.read_text())
  if page.parent.name != "coming_from":
    return text
  lines = text.splitlines()
  return "\n".join(line.rsplit(" | ", 1)[-1] if line.startswith("|") else line for line in lines)


def inline(page: pathlib.Path) -> list[str]:
  """Returns what stands in backticks in the text of a page."""
  return re.findall(r"`([^`\n]+)`", outside(page))


def shell(folder: pathlib.Path) -> pathlib.Path:
  """Makes a folder of the commands that pages use, which run this checkout; returns it.

  Those that name an experiment get the flags in the variable KNOBS too.
  """
  folder.mkdir()
  knobs = 'case "$*" in *--fdl_config=*|*--exp=*) set -- "$@" $KNOBS;; esac'
  commands = {name: f" -m {entry.partition(':')[0]}" for name, entry in SCRIPTS.items()}
  for name, module in {**commands, "python": ""}.items():
    lines = ["#!/usr/bin/env bash", knobs, f'exec {warm_python.program()}{module} "$@"']
    (folder / name).write_text("\n".join(lines))
    (folder / name).chmod(0o755)
  return folder


def main():
  """Prints how many commands there are, by page."""
  all_commands = all_run = 0
  for page in PAGES:
    found = blocks(page)
    there = sum(len(block.commands) for block in found)
    run = sum(len(block.commands) for block in found if block.run)
    all_commands, all_run = all_commands + there, all_run + run
    if there:
      print(f"{page.relative_to(REPOSITORY)!s:40} {run:3} of {there:3} commands run")
  print(f"{'all':40} {all_run:3} of {all_commands:3}")


if __name__ == "__main__":
  main()
