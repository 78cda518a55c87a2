# SPDX-License-Identifier: Apache-2.0
"""The chat template of a tokenizer's folder, rendered within bounds of time and memory."""

import functools
import json
import pathlib
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from paxlike import input_files
from paxlike.data import template_worker, tokenizer_classes
from paxlike.data.token_settings import TokenSettings
from paxlike.errors import UserError

# Beside a tokenizer of Hugging Face: how it is set up, and its template where that is by itself.
FILES = ("tokenizer_config.json", "chat_template.jinja")
MORE = "additional_chat_templates"  # A folder of those that have a name, NAME.jinja.
_TEMPLATE_BYTES = 1_000_000


def read(tokenizer: pathlib.Path) -> tuple[str, pathlib.Path, dict[str, str]]:
  """Returns a template's source, the file it is in, and bos, eos, pad and other tokens by name.

  `tokenizer` is the file beside which it is.

  Raises:
    UserError: There is none.
  """
  config, own = (tokenizer.with_name(name) for name in FILES)
  content = input_files.read_json(config) if input_files.is_there(config) else {}
  source, file = content.get("chat_template"), config
  if input_files.is_there(own):
    source, file = input_files.read_text(own, limit=_TEMPLATE_BYTES), own
  if not source:
    raise UserError(f"CHAT_TEMPLATE=tokenizer: there is none in {config}, nor in {own}.")
  if isinstance(source, list):  # Several by name.
    named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
    source = named.get("default")
  if not isinstance(source, str):
    raise UserError(f"CHAT_TEMPLATE=tokenizer: {file} has no template that is a text.")
  settings = TokenSettings(tokenizer)
  return source, file, settings.roles(tokenizer_classes.tokens(settings))


class OwnTemplate:
  """A template in Jinja, in a process of its own that is started when first needed.

  Attributes:
    source: What it says.
  """

  def __init__(self, source: str, *, file: pathlib.Path):
    """`file` is named where the template fails."""
    self.source = source
    self._file = file

  def check(self):
    """Raises UserError if it is no template."""
    _ = self._process

  def render(self, values: Mapping[str, Any]) -> str:
    """Returns the text.

    Raises:
      UserError: The template fails, does not end, or its output is too long.
    """
    return self._ask(self._process, values)

  @functools.cached_property
  def _process(self) -> subprocess.Popen[str]:
    # -P: nothing beside the program is imported, where a name could be that of a library.
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

  def _ask(self, process: subprocess.Popen[str], what: Any) -> str:
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
        why = f"computes for more than {template_worker.SECONDS} seconds"
      raise UserError(f"CHAT_TEMPLATE=tokenizer: {self._file} {why}.")
    answer = json.loads(line)
    if "error" in answer:
      raise UserError(f"CHAT_TEMPLATE=tokenizer: {self._file}: {answer['error'].rstrip('.')}.")
    return answer["text"]


def _end(process: subprocess.Popen[str]):
  process.kill()
  process.communicate()
