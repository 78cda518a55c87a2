# SPDX-License-Identifier: Apache-2.0
"""The chat template of a tokenizer's folder, rendered with limits of time and memory."""

import functools
import json
import pathlib
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from paxlike import untrusted_files
from paxlike.data.chat import template_worker
from paxlike.data.tokenizers import tokenizer_classes
from paxlike.data.tokenizers.token_settings import TokenSettings, check_file
from paxlike.errors import UserError

# Files beside a Hugging Face tokenizer that may hold its template.
FILES = ("tokenizer_config.json", "chat_template.jinja")
MORE = "additional_chat_templates"  # A folder of named templates, NAME.jinja.
_TEMPLATE_BYTES = 1_000_000


def read(tokenizer: pathlib.Path) -> tuple[str, pathlib.Path, dict[str, str]]:
  """Returns a template's source, its file, and the special tokens by role, such as `bos_token`.

  `tokenizer` is the tokenizer's file; the template is in the same folder.

  Raises:
    UserError: There is no template, or `tokenizer` is a folder.
  """
  check_file(tokenizer)
  settings = TokenSettings(tokenizer)
  config, own = (pathlib.Path(settings.path(name)) for name in FILES)
  content = untrusted_files.read_json(config) if untrusted_files.is_there(config) else {}
  source, file = content.get("chat_template"), config
  if untrusted_files.is_there(own):
    source, file = untrusted_files.read_text(own, limit=_TEMPLATE_BYTES), own
  if not source:
    raise UserError(f"CHAT_TEMPLATE=tokenizer: there is no template in {config} or {own}.")
  if isinstance(source, list):  # Several by name.
    named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
    source = named.get("default")
  if not isinstance(source, str):
    raise UserError(f"CHAT_TEMPLATE=tokenizer: the template in {file} is not a string.")
  return source, file, settings.roles(tokenizer_classes.tokens(settings))


class Marked(NamedTuple):
  """A rendered text, and who wrote what.

  Attributes:
    text: The text.
    generated: (begin, end) of each `{% generation %}` block; None if the template has none.
    owned: (begin, end, index) of the text that the template outputs in a loop over messages, with
      the index of the message.
  """

  text: str
  generated: list[tuple[int, int]] | None
  owned: list[tuple[int, int, int]]


class TokenizerTemplate:
  """A Jinja template, rendered in a separate process that starts when first needed.

  Attributes:
    source: Its source.
  """

  def __init__(self, source: str, *, file: pathlib.Path):
    """`file` is named in errors."""
    self.source = source
    self._file = file

  def check(self):
    """Raises UserError if it is not a valid template."""
    _ = self._process

  def render(self, values: Mapping[str, Any]) -> str:
    """Returns the rendered text.

    Raises:
      UserError: The template fails, exceeds the time limit, or its output is too long.
    """
    return self._ask(self._process, {"values": values, "marked": False})["text"]

  def marked(self, values: Mapping[str, Any]) -> Marked:
    """Returns the rendered text with who wrote what.

    Raises:
      UserError: As `render`, or it cannot be found.
    """
    return Marked(**self._ask(self._process, {"values": values, "marked": True}))

  @functools.cached_property
  def _process(self) -> subprocess.Popen[str]:
    # -P keeps the program's folder off sys.path, where a file could shadow a library.
    process = subprocess.Popen(
      [sys.executable, "-P", template_worker.__file__],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      encoding="utf-8",
    )
    weakref.finalize(self, _end, process)
    self._ask(process, self.source)
    return process

  def _ask(self, process: subprocess.Popen[str], what: Any) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    try:
      process.stdin.write(f"{json.dumps(what, default=str)}\n")
      process.stdin.flush()
      line = process.stdout.readline()
    except BrokenPipeError:
      line = ""
    if not line:
      status = process.wait()
      self.__dict__.pop("_process", None)
      why = f"ended with status {status}"
      if status == -signal.SIGXCPU:
        why = f"takes more than {template_worker.SECONDS} seconds"
      raise UserError(f"CHAT_TEMPLATE=tokenizer: {self._file} {why}.")
    answer = json.loads(line)
    if "error" in answer:
      raise UserError(f"CHAT_TEMPLATE=tokenizer: {self._file}: {answer['error'].rstrip('.')}.")
    return answer


def _end(process: subprocess.Popen[str]):
  process.kill()
  process.communicate()
