# SPDX-License-Identifier: Apache-2.0
"""The program that renders a tokenizer's own chat template, in a separate process.

A template is untrusted code: the process has limits of memory and time, and the template runs in
Jinja's sandbox. Each line of stdin is JSON and is answered by one line of JSON: first the
template's source, then for each rendering its variables, and whether to mark who wrote what.

To mark, a second compilation of the template also outputs `_MARK`, a code and `_MARK`: around
`{% generation %}`, and in each iteration of a loop over messages. They are removed from its text,
which must be that of the template itself.
"""

import datetime
import json
import resource
import sys
from typing import Any

MEMORY_BYTES = 2**30
SECONDS = 10  # CPU time per answer.
TEXT_CHARACTERS = 2**24


def main():
  """Answers requests until stdin ends."""
  resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  template: Any = None
  for line in sys.stdin:
    _allow(SECONDS)
    answer: dict[str, Any]
    try:
      request = json.loads(line)
      if template is None:
        template = Template(request)
        answer = {"text": ""}
      else:
        answer = template.answer(request["values"], marked=request["marked"])
    except BaseException as error:  # A template can fail in any way.
      said = str(error).strip() or type(error).__name__
      answer = {"error": said[:1000]}
    print(json.dumps(answer), flush=True)


def _allow(seconds: int):
  """Limits the CPU time of this process to `seconds` from now."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  until = int(used.ru_utime + used.ru_stime) + 1 + seconds
  resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class Template:
  """A template with the extensions, filters and functions of transformers."""

  def __init__(self, source: str):
    import jinja2.ext
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.add_extension(_marks())
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    self._environment: Any = environment
    marks = (one for one in environment.extensions.values() if hasattr(one, "owners"))
    self._marks: Any = next(marks)
    self._source = source
    self._plain = environment.from_string(source)
    self._marked: Any = None

  def answer(self, values: dict[str, Any], *, marked: bool) -> dict[str, Any]:
    """Renders the template.

    Args:
      values: The variables.
      marked: Whether to find who wrote what.

    Returns:
      text: The text. If marked, also:
      generated: [begin, end] of each `{% generation %}` block; None if the template has none.
      owned: [begin, end, index] of the text that iterations over messages output, each with the
        index of its message.
    """
    text = self._plain.render(values)
    if len(text) > TEXT_CHARACTERS:
      raise ValueError(f"its output has {len(text):,} characters")
    if not marked:
      return {"text": text}
    if self._marked is None:
      self._marked = self._environment.from_string(self._marks.tree(self._source))
    self._marks.start(values["messages"])
    whole, generated, owned = _unmarked(self._marked.render(values))
    if _MARK in text or whole != text:
      raise ValueError("it does not show which text is whose: use {% generation %} in it")
    return {"text": text, "generated": generated if self._marks.generates else None, "owned": owned}


_MARK = "\ufdd0"  # Unicode assigns it to no character.


def _marks() -> Any:
  """Returns the extension that adds marks."""
  import jinja2.ext
  from jinja2 import nodes

  class Marks(jinja2.ext.Extension):
    """`{% generation %}`, which has an effect only in a marked template; marks of loops.

    Attributes:
      owners: id() of each message -> its index.
      generates: Whether the template has `{% generation %}`.
    """

    tags = {"generation"}

    def __init__(self, environment: Any):
      super().__init__(environment)
      self.owners: dict[int, int] = {}
      self.generates = False
      self._adds_marks = False
      self._running: set[int] = set()

    def parse(self, parser: Any) -> nodes.Node:
      self.generates = True
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      if self._adds_marks:
        begin, end = (nodes.Output([nodes.TemplateData(f"{_MARK}{x}{_MARK}")]) for x in "()")
        body = [begin, *body, end]
      return nodes.Scope(body, lineno=line)

    def tree(self, source: str) -> nodes.Template:
      """Returns the marked template."""
      self._adds_marks = True
      tree = self.environment.parse(source)
      numbers: dict[int, int] = {}  # id() of a loop -> its number; equal loops are of one value.
      for number, loop in enumerate([*tree.find_all(nodes.For)]):
        if isinstance(loop.target, nodes.Name):
          loop.body.insert(0, self._call("begin", number, nodes.Name(loop.target.name, "load")))
          numbers[id(loop)] = number
      for parent in [tree, *tree.find_all(nodes.Node)]:
        for _, value in parent.iter_fields():
          if isinstance(value, list):
            for at in reversed(range(len(value))):
              if id(value[at]) in numbers:
                value.insert(at + 1, self._call("end", numbers[id(value[at])]))
      return tree

    def _call(self, name: str, number: int, *items: nodes.Expr) -> nodes.Output:
      return nodes.Output([self.call_method(name, [nodes.Const(number), *items])])

    def start(self, messages: list[Any]):
      """Begins a rendering."""
      self.owners = {id(message): index for index, message in enumerate(messages)}
      self._running.clear()

    def begin(self, loop: int, item: Any) -> str:
      """Returns the mark of an iteration; "" in a loop over other items."""
      index = self.owners.get(id(item))
      if index is None:
        return self.end(loop)
      self._running.add(loop)
      return f"{_MARK}{loop} {index}{_MARK}"

    def end(self, loop: int) -> str:
      """Returns the mark after a loop; "" if it had no message."""
      if loop not in self._running:
        return ""
      self._running.remove(loop)
      return f"{_MARK}{loop}{_MARK}"

  return Marks


def _unmarked(marked: str) -> tuple[str, list[list[int]], list[list[int]]]:
  """Returns a marked text without its marks, and the spans of `Template.answer`."""
  text, generated, owned = "", [], []
  loops: list[tuple[str, int]] = []  # The loops over messages that run, and their messages.
  begin = 0
  for number, piece in enumerate(marked.split(_MARK)):
    if number % 2 == 0:
      if piece and loops:
        owned.append([len(text), len(text) + len(piece), loops[-1][1]])
      text += piece
    elif piece == "(":
      begin = len(text)
    elif piece == ")":
      generated.append([begin, len(text)])
    else:
      loop, _, message = piece.partition(" ")
      running = [one for one, _ in loops]
      if loop in running:
        del loops[running.index(loop) :]
      if message:
        loops.append((loop, int(message)))
  return text, generated, owned


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | str | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # Jinja's own filter sorts keys and escapes HTML.
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _refuse(message: str):
  raise ValueError(message)


def _now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
  main()
