# SPDX-License-Identifier: Apache-2.0
import os

import pytest

from paxlike import run_folder
from paxlike.errors import UserError


def test_a_folder_is_made_with_its_parents_and_is_absolute(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder = run_folder.create("a/b")
  assert folder == tmp_path / "a" / "b"
  assert list(folder.iterdir()) == []
  assert run_folder.create("a/b") == folder


@pytest.mark.parametrize("path", ["file/run", "file/deep/run", "/proc/run"])
def test_a_folder_that_cannot_be_is_named_and_nothing_is_left(tmp_path, monkeypatch, path):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=f"--job_log_dir={path} cannot be written"):
    run_folder.create(path)
  assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_replaced_as_a_whole(tmp_path):
  folder = run_folder.create(str(tmp_path))
  for text in ("one", "two"):
    run_folder.write(folder / "status.json", text)
    assert (folder / "status.json").read_text() == text
  assert os.listdir(tmp_path) == ["status.json"]
