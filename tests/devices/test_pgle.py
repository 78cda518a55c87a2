# SPDX-License-Identifier: Apache-2.0
"""Profiles by which XLA schedules are read as they are written, and damaged ones are refused."""

import os
import re

import pytest

from paxlike import file_io
from paxlike.cli import command_line
from paxlike.devices import pgle
from paxlike.errors import UserError


def test_what_is_written_is_read(tmp_path):
  costs = {"fusion.1": 1.5, "all-gather-start.2": 7040.52, "custom-call": 0.0}
  path = tmp_path / "p.pbtxt"
  path.write_text(pgle.text(costs))
  assert pgle.read(str(path)).costs == costs


def test_the_forms_of_other_writers_are_read():
  """As protocol buffers print it, as JAX-Toolbox's converter for nsys does, and with prefixes."""
  text = """# from nsys
costs {
  name: "fusion.1"
  cost_us: 2.5e1
}
costs { cost_us: 3 name: "08a5::all-reduce-start" }
costs: { name: "copy.3" cost_us: 1 }
"""
  assert pgle.parse(text, source="x").costs == {
    "fusion.1": 25,
    "all-reduce-start": 3,
    "copy.3": 1,
  }


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"\x0a\x0f\x0a\x08fusion.1",
    b"{}",
    b'costs { name: "a" cost_us: nan }',
    b'costs { name: "a" cost_us: -1 }',
    b'costs { name: "a" cost_us: x }',
    b'costs { name: "a" cost_us: 1 }\ncosts { name: "b" cost_us: 1',
    b"<html></html>",
  ],
)
def test_other_files_are_refused(content, tmp_path):
  path = tmp_path / "p.pbtxt"
  path.write_bytes(content)
  with pytest.raises(UserError, match=r"^--pgle_profile=.*p.pbtxt is not a profile of instru"):
    pgle.read(str(path))


def test_files_that_cannot_be_read_are_named(tmp_path):
  with pytest.raises(UserError, match=r"--pgle_profile=.*/none.pbtxt: No such file"):
    pgle.read(str(tmp_path / "none.pbtxt"))
  with pytest.raises(UserError, match="is a folder, not a file"):
    pgle.read(str(tmp_path))


def test_a_profile_of_another_program_is_refused():
  profile = pgle.Profile("--pgle_profile=p", dict.fromkeys("abcdefghij", 1.0))
  profile.check([*"abcdefgh", "more"])
  with pytest.raises(
    UserError, match=r"p is of another program: of its 10 instr.* step has 7"
  ) as e:
    profile.check("abcdefg")
  (hint,) = re.findall(r"--mode=profile \S+", str(e.value))  # It is a command that works.
  assert command_line.parse(["paxlike", "--fdl_config=Pile126M", *hint.split()]).save == "FILE"


def test_the_copy_that_xla_reads_is_named_for_its_content():
  """JAX's cache of programs knows the path alone."""
  one, other = (pgle.Profile("x", {"a": cost}).options() for cost in (1.0, 2.0))
  assert one == pgle.Profile("y", {"a": 1.0}).options() != other
  (path,) = one.values()
  assert pgle.read(path).costs == {"a": 1.0}


def test_without_a_cache_that_can_be_written_one_temporary_folder_holds_the_copies(
  tmp_path, monkeypatch
):
  (tmp_path / "a_file").write_text("")
  profile = pgle.Profile("x", {"a": 1.0})
  folders = set()
  for folder in (None, tmp_path / "a_file"):
    monkeypatch.setattr(pgle, "_folder_in_cache", lambda folder=folder: folder)
    (path,) = profile.options().values()
    assert pgle.read(path).costs == {"a": 1.0}
    folders.add(os.path.dirname(path))
  assert len(folders) == 1


def test_a_store_that_fails_is_named(monkeypatch):
  class StoreError(Exception):
    pass

  def fail(path):
    raise StoreError("403: no access")

  monkeypatch.setattr(file_io, "failures", lambda: (OSError, StoreError))
  monkeypatch.setattr(file_io, "read_bytes", fail)
  with pytest.raises(UserError, match=r"^--pgle_profile=gs://b/p.pbtxt: 403: no access\.$"):
    pgle.read("gs://b/p.pbtxt")
