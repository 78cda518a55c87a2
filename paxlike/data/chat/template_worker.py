# SPDX-License-Identifier: Apache-2.0
"""The program that renders a tokenizer's own chat template, in a separate process.

A template is untrusted code: the process has limits of memory and time, and the template runs in
Jinja's sandbox. Each line of stdin is JSON and is answered by one line of JSON: first the
template's source, then the variables of each rendering.
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
      if template is None:
        template = _compiled(json.loads(line))
        answer = {"text": ""}
      else:
        answer = {"text": _rendered(template, json.loads(line))}
    except BaseException as error:  # A template can fail in any way.
      said = str(error).strip() or type(error).__name__
      answer = {"error": said[:1000]}
    print(json.dumps(answer), flush=True)


def _allow(seconds: int):
  """Limits the CPU time of this process to `seconds` from now."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  until = int(used.ru_utime + used.ru_stime) + 1 + seconds
  resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _compiled(source: str) -> Any:
  """Returns a template with the extensions, filters and functions of transformers."""
  import jinja2.ext
  import jinja2.nodes
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's text; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      return jinja2.nodes.Scope(body, lineno=line)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
  )
  environment.filters["tojson"] = _to_json
  environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
  return environment.from_string(source)


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


def _rendered(template: Any, values: dict[str, Any]) -> str:
  text = template.render(values)
  if len(text) > TEXT_CHARACTERS:
    raise ValueError(f"its output has {len(text):,} characters")
  return text


if __name__ == "__main__":
  main()
