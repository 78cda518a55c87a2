# SPDX-License-Identifier: Apache-2.0
import json
import subprocess

import pytest
from etils import epath
from helpers import run_headers

from paxlike.errors import UserError
from paxlike.telemetry.trackers import provenance


def test_a_run_keeps_its_id(tmp_path):
  folder = epath.Path(tmp_path)
  first = provenance.run_id(folder)
  assert first.isalnum() and provenance.run_id(folder) == first
  (tmp_path / "other").mkdir()
  assert provenance.run_id(folder / "other") != first


DAMAGED = ["", "[]", "{}", '{"id": 1}', '{"id": ""}', '{"id": "a b"}', "\xff"]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_id_is_refused(tmp_path, text):
  (tmp_path / provenance.FILE).write_text(text)
  with pytest.raises(UserError, match=r"trackers\.json is damaged .*delete it"):
    provenance.run_id(epath.Path(tmp_path))


def git(*arguments: str) -> str:
  author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
  done = subprocess.run(["git", *author, *arguments], check=True, capture_output=True, text=True)
  return done.stdout.strip()


def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
  assert provenance._git() == {}
  git("init", "--initial-branch=topic")
  (tmp_path / "model.py").write_text("a")
  git("add", ".")
  git("commit", "--message=first")
  (tmp_path / "notes.txt").write_text("not of the repository")
  clean = {"git_commit": git("rev-parse", "HEAD"), "git_branch": "topic", "git_changed_files": 0}
  assert provenance._git() == clean
  (tmp_path / "model.py").write_text("b")
  assert provenance._git() == clean | {"git_changed_files": 1}
  monkeypatch.setenv("PATH", "")
  assert provenance._git() == {}


def test_facts_are_json():
  facts = provenance.facts(run_headers.made())
  assert json.loads(json.dumps(facts)) == facts
  assert {"num_params", "jax", "python", "host", "device", "mesh", "command"} <= facts.keys()
