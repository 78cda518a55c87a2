# SPDX-License-Identifier: Apache-2.0
"""The line of the user's code that an exception is reported with."""

import linecache

import pytest

from paxlike import user_code
from paxlike.config import knob_types


def caught(code: str, name: str) -> BaseException:
  """What code that is said to be in a file raises."""
  with pytest.raises(Exception) as found:
    exec(compile(code, name, "exec"), {"convert": knob_types.convert})
  return found.value


def test_it_is_the_innermost_that_is_neither_ours_nor_a_library_s(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("def f():\n  convert(int, 'x', text=True)\nf()\n")
  error = caught(path.read_text(), str(path))
  assert user_code.line_of(error, entry=True) == f"{path}, line 2, in f"


def test_cells_of_a_notebook_are_the_user_s(monkeypatch):
  name = "/tmp/ipykernel_7/123.py"
  error = caught("\n1 / 0", name)
  assert name not in user_code.line_of(error, entry=True)  # No such file is known.
  monkeypatch.setitem(linecache.cache, name, (6, None, ["\n", "1 / 0"], name))
  assert user_code.line_of(error, entry=True) == f"{name}, line 2, in <module>"


def test_the_program_that_was_started_may_be_none_of_the_user_s(tmp_path, monkeypatch):
  path = tmp_path / "command.py"
  path.write_text("1 / 0")
  error = caught(path.read_text(), str(path))
  monkeypatch.setattr("__main__.__file__", str(path), raising=False)
  assert user_code.line_of(error, entry=True).startswith(str(path))
  assert not user_code.line_of(error, entry=False).startswith(str(path))


def test_a_summary_is_one_line():
  assert user_code.summary(ValueError("a\nb\nc.")) == "ValueError: a b"
  assert user_code.summary(KeyError()) == "KeyError"
  assert user_code.summary(SystemExit(3)) == "sys.exit(3) was called"
