# SPDX-License-Identifier: Apache-2.0
"""Which lines of a sample count as Python."""

import pathlib

import pytest

from paxlike import registry
from paxlike.experiments import tiny
from paxlike.telemetry.callbacks import Callbacks, of_experiment

PYTHON = """\
def __init__(self, x):
    self.x = x
    if x is None:

        # A comment, and a blank line: neither counts.
        return "\\d"
    elif x:
        pass
    else:
    for a, b in x: print(a)
    except (A, B) as error:
    finally:
    with open(x) as file, y:
    match x:
    case [1, *_]:
    @property
    async def f(): ...
    class A(B): pass
    raise ValueError(f"{x}") from None
    import a.b as c; x += 1
"""
OTHER = """\
def f(self
    x = (1, 2
    return return
    Return the name of it.
    self.x = )
    if x
    else
    case :
    x = 'a
    \0
"""


@pytest.mark.parametrize("line", [line for line in PYTHON.splitlines() if line.strip()])
def test_a_line_of_python_counts(line):
  is_comment = line.strip().startswith("#")
  assert tiny.parsed_lines(f"{line}\n") == ((0, 0) if is_comment else (1, 1))


@pytest.mark.parametrize("line", OTHER.splitlines())
def test_another_line_does_not(line):
  assert tiny.parsed_lines(f"{line}\n") == (0, 1)


def test_most_lines_of_python_itself_count():
  parsed, total = tiny.parsed_lines(pathlib.Path(tiny.__file__).read_text())
  assert total > 100 and 0.7 < parsed / total < 1


def test_the_line_is_printed_after_the_sample(capsys):
  callbacks = Callbacks(of_experiment(registry.find("TinyPython")()))
  text = "x):\n  return x\n\n  this is no Python\n  retu"
  callbacks.call("on_record", {"kind": "train", "updates": 1})
  callbacks.call("on_record", {"kind": "sample", "prompt": "def f(", "text": text})
  assert capsys.readouterr().out == "2 of 3 lines of the sample parse as Python\n"
