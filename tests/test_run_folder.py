# SPDX-License-Identifier: Apache-2.0
import errno
import os
import pwd
import tempfile

import pytest
from etils import epath
from helpers import program

from paxlike import file_io, run_folder
from paxlike.convert import new_folder
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


@pytest.mark.parametrize("path", ["x[1]", "a*/run", "what?"])
def test_a_folder_that_orbax_would_take_for_a_pattern_is_refused(tmp_path, monkeypatch, path):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=r"^--job_log_dir=\S+: checkpoints cannot be written"):
    run_folder.create(path)
  assert os.listdir(tmp_path) == []
  (tmp_path / "inner[1]").mkdir()
  monkeypatch.chdir(tmp_path / "inner[1]")
  with pytest.raises(UserError, match=r"inner\[1\]/run\.$"):
    run_folder.create("run")


def test_what_is_said_of_checkpoints_is_true(tmp_path):
  folder = epath.Path(tmp_path / "run[1]")
  for said in (False, True):
    with pytest.raises(UserError, match="cannot be written") as caught, run_folder.writing(folder):
      raise OSError(errno.ENOSPC, "No space left on device")
    assert ("checkpoints are intact" in str(caught.value)) == said
    (folder / "checkpoints" / "checkpoint_00000001").mkdir(parents=True, exist_ok=True)


def test_folders_that_were_there_stay_though_empty(tmp_path, monkeypatch):
  def full(**unused):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(tempfile, "TemporaryFile", full)
  (tmp_path / "empty").mkdir()
  for path in (tmp_path / "empty", tmp_path / "empty" / "a" / "b"):
    with pytest.raises(UserError, match="No space left on device"):
      run_folder.create(str(path))
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("name", ["config.json", "status.json", "checkpoints", "summaries"])
def test_a_pipe_where_a_run_writes_is_named_before_it_writes(tmp_path, name):
  os.mkfifo(tmp_path / name)
  with pytest.raises(UserError, match=f"{name} in it is no (file|folder): move it away"):
    run_folder.create(str(tmp_path))
  assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("path", ["http://x/y", "gs://", "gs:///", "/" + "y/" * 1500, "y" * 5000])
def test_a_path_that_names_no_folder_is_refused(path):
  said = "expected a local folder|no bucket is named|too long"
  for reach in (run_folder.create, run_folder.existing):
    with pytest.raises(UserError, match=said):
      reach(path)
  with pytest.raises(UserError, match=said), run_folder.entered(path):
    pass


@pytest.mark.parametrize("reach", [run_folder.existing, run_folder.create])
def test_a_store_that_cannot_be_used_is_refused_in_one_line(reach):
  with pytest.raises(UserError, match="--job_log_dir=hdfs://a/run: expected a local folder or gs:"):
    reach("hdfs://a/run")
  with pytest.raises(UserError, match=r"--job_log_dir=az://a/run cannot be .*Install adlfs"):
    reach("az://a/run")


def test_what_a_store_does_not_have_is_said_to_be_missing():
  with (
    pytest.raises(UserError, match=r"^gs://a/run cannot be read: not found: http://b\.$"),
    run_folder.reading(epath.Path("gs://a/run")),
  ):
    raise FileNotFoundError("http://b")


def test_a_name_that_is_too_long_is_a_mistake_like_others(tmp_path):
  with pytest.raises(UserError, match="--job_log_dir"):
    run_folder.create(str(tmp_path / "new" / ("x" * 300)))
  assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_written_leaves_the_old_one_alone(tmp_path):
  folder = run_folder.create(str(tmp_path))
  (folder / "taken").mkdir()
  refused = pytest.raises(UserError, match=f"{tmp_path} cannot be written")
  with refused, run_folder.writing(folder):
    file_io.write(folder / "taken", "text")
  assert os.listdir(tmp_path) == ["taken"]


def test_only_what_a_killed_process_left_is_removed(tmp_path):
  victim = tmp_path / "victim"
  victim.mkdir()
  (tmp_path / ".out.123").symlink_to(victim)
  (tmp_path / ".out.²").mkdir()
  with new_folder.filling(tmp_path / "out", flag="out") as building:
    (building / "file").touch()
  assert sorted(os.listdir(tmp_path)) == sorted([".out.123", ".out.²", "out", "victim"])


def test_two_that_write_one_file_do_not_meet(tmp_path, monkeypatch):
  """As two containers, in each of which the process has the number 1."""
  monkeypatch.setattr(os, "getpid", lambda: 1)
  path = epath.Path(tmp_path / "decode.jsonl")
  with file_io.replacing(path) as first:
    first.write("first")
    with file_io.replacing(path) as second:
      second.write("second")
      file_io.write(path, "third")
    assert path.read_text() == "second"
  assert path.read_text() == "first"
  assert os.listdir(tmp_path) == ["decode.jsonl"]


@pytest.mark.slow
def test_users_without_a_name_train_resume_and_evaluate(tmp_path, monkeypatch, text):
  """As in a container that runs as a number."""

  def unknown(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")

  monkeypatch.setattr(pwd, "getpwuid", unknown)
  flags = (*program.TEXT, f"--fdl.DATA_PATH={text}", "--fdl.NUM_LAYERS=1")
  flags += (f"--job_log_dir={tmp_path}", "--fdl.STACK_TRACE_INTERVAL=1")
  for steps in (1, 2):
    assert program.run(*flags, f"--fdl.MAX_STEPS={steps}") == 0
  assert program.run(*flags, "--mode=eval") == 0


def test_a_file_is_replaced_as_a_whole(tmp_path):
  folder = run_folder.create(str(tmp_path))
  for text in ("one", "two"):
    file_io.write(folder / "status.json", text)
    assert (folder / "status.json").read_text() == text
  assert os.listdir(tmp_path) == ["status.json"]
