# SPDX-License-Identifier: Apache-2.0
"""Data sets and chat templates that are made to harm are refused in one line, in bounds."""

import gzip
import json
import os
import pathlib
import subprocess
import sys

import pyarrow
import pytest
from helpers.damaged_files import TALK, within, write_tokenizer

from paxlike.data.chat import template_worker, templates
from paxlike.data.text import find_files, records, text_files
from paxlike.errors import UserError

TEMPLATES = {
  "division": ("{{ 1/0 }}", "division by zero"),
  "memory": ("{{ 'a' * 10**10 }}", "MemoryError"),
  "format": ("{{ '%10000000000s' % 1 }}", "MemoryError"),
  "long_text": ("{{ 'a' * (2**24 + 1) }}", "its output has 16,777,217 characters"),
  "range": ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
  "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe|is undefined"),
  "globals": ("{{ cycler.__init__.__globals__.os.system('true') }}", "is unsafe|is undefined"),
  "format_map": ("{{ '{0.__class__.__base__}'.format(messages) }}", "is unsafe|is undefined"),
  "changed": ("{{ messages.append(1) }}", "not safely callable|is unsafe|is undefined"),
  "include": ("{% include '/etc/passwd' %}", "no loader"),
  "syntax": ("{% for %}", "expected token|Expected"),
  "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
  "exception": ("{{ raise_exception('a\nb') }}", "a\nb"),
}
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def folder(tmp_path):
  write_tokenizer(tmp_path)
  return tmp_path


def rendered(folder, source):
  (folder / "chat_template.jinja").write_text(source)
  return templates.template("tokenizer", vocab_path=str(folder / "tokenizer.json"))(TALK)


@pytest.mark.parametrize(("source", "said"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_fails_is_named(folder, source, said):
  with within(20), pytest.raises(UserError, match=said) as refusal:
    rendered(folder, source)
  assert str(refusal.value).startswith(f"CHAT_TEMPLATE=tokenizer: {folder}/chat_template.jinja: ")


def test_a_template_that_does_not_end_is_ended(folder, monkeypatch):
  (folder / "worker.py").write_text(
    pathlib.Path(template_worker.__file__).read_text().replace("SECONDS = 10", "SECONDS = 0")
  )
  monkeypatch.setattr(template_worker, "__file__", str(folder / "worker.py"))
  with within(20), pytest.raises(UserError, match="takes more than"):
    rendered(folder, LOOP)


@pytest.mark.parametrize(
  "told", ["[]", '{"chat_template": 5}', '{"chat_template": [1]}', "{" * 9999]
)
def test_a_template_that_is_none_is_said(folder, told):
  (folder / "tokenizer_config.json").write_text(told)
  with pytest.raises(UserError):
    templates.template("tokenizer", vocab_path=str(folder / "tokenizer.json"))


def packed(path, pieces):
  """Writes bytes into a file that its name says the packing of."""
  if path.suffix == ".gz":
    with gzip.open(path, "wb") as file:
      file.writelines(pieces)
  elif path.suffix == ".zst":
    with pyarrow.output_stream(str(path), compression="zstd") as file:
      for piece in pieces:
        file.write(piece)
  else:
    path.write_bytes(b"".join(pieces))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_without_end_is_said_to_be_too_long(tmp_path, name, monkeypatch):
  monkeypatch.setattr(records, "LINE_BYTES", 10**6)
  packed(tmp_path / name, [b'{"text": "a"}\n', *[b"a" * 10**6] * 3])
  with pytest.raises(UserError, match=rf"{name}:2: a line of more than 1,000,000 bytes: split it"):
    list(records.read(str(tmp_path / name), ["text"]))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_stands_for_far_more_than_its_size_is_refused(tmp_path, name, monkeypatch):
  monkeypatch.setattr(records, "_UNPACKED_BYTES", 10**6)
  monkeypatch.setattr(records, "_EMPTY_LINES", 100)
  packed(tmp_path / name, [b" " * 9999 + b"\n"] * 99 + [b'{"text": "%s"}\n' % (b"a" * 10**6)] * 3)
  with pytest.raises(UserError, match="more than 500 times its size"):
    list(records.read(str(tmp_path / name), ["text"]))
  packed(tmp_path / name, [b"\n"] * 101)
  with pytest.raises(UserError, match=f"{name}:101: more than 100 lines are empty"):
    list(records.read(str(tmp_path / name), ["text"]))


@pytest.mark.slow
def test_200_kilobytes_of_2_gigabytes_are_refused_in_a_gigabyte(tmp_path):
  packed(tmp_path / "a.jsonl.zst", (b"a" * 10**8 for _ in range(20)))
  assert os.path.getsize(tmp_path / "a.jsonl.zst") < 250_000
  program = (
    "import resource, sys, pyarrow\n"
    "from paxlike.data.text import records\n"
    "from paxlike.errors import UserError\n"
    "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
    "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)\n"
    "try:\n  list(records.read(sys.argv[1], ['text']))\n"
    "except UserError as error:\n  sys.exit(f'said: {error}')\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program, str(tmp_path / "a.jsonl.zst")],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stderr.startswith("said: ") and "a.jsonl.zst:1: a line of more than" in done.stderr


@pytest.mark.parametrize(
  "line", ["[" * 100_000, '{"a": ' + "9" * 10_000 + "}", '{"text": "\\ud800"', "nan", "\0"]
)
def test_lines_that_are_none_are_named(tmp_path, line):
  (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
  with pytest.raises(UserError, match=r"a\.jsonl:2"):
    list(records.read(str(tmp_path / "a.jsonl"), ["text"]))


def test_a_text_of_more_than_memory_is_refused_before_it_is_read(tmp_path):
  (tmp_path / "a.txt").touch()
  os.truncate(tmp_path / "a.txt", 10**13)
  with pytest.raises(UserError, match="the limit for such a file is 4,294,967,296"):
    list(text_files.read(str(tmp_path / "a.txt"), "text"))


def test_links_that_lead_round_end(tmp_path):
  for name in ("a", "b"):
    (tmp_path / name).symlink_to(".")
  (tmp_path / "more").mkdir()
  for name in ("x.jsonl", "more/y.jsonl"):
    (tmp_path / name).write_text(json.dumps({"text": "a"}))
  os.mkfifo(tmp_path / "z.jsonl")
  with within(20):
    found = find_files.find(str(tmp_path), records.SUFFIXES, knob="DATA_PATH")
  assert found == [str(tmp_path / "more/y.jsonl"), str(tmp_path / "x.jsonl")]
