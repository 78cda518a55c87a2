# SPDX-License-Identifier: Apache-2.0
"""`paxlike-convert` as a process: what it prints, and what is left however it ends."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers import tiny_llama

from paxlike.convert import new_folder
from paxlike.convert.main import run
from paxlike.errors import UserError, one_line

NO_TOKENIZER = "has no tokenizer, so it can neither decode nor evaluate text\n"
SUMMARY = f"""\
made: 21 weights in float32
computes in float32 (none is declared, and weights are float32): --fdl.FPROP_DTYPE changes that
{NO_TOKENIZER}"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The working directory, which has a model."""
  tiny_llama.write(tmp_path / "theirs")
  monkeypatch.chdir(tmp_path)
  return tmp_path


def start(*flags, to="made", before=(), stdout=subprocess.PIPE):
  # As for a user: nothing says that there are no accelerators.
  environ = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
  command = [*before, sys.executable, "-m", "paxlike.convert.main", *flags, f"--to={to}"]
  return subprocess.Popen(command, text=True, env=environ, stdout=stdout, stderr=subprocess.PIPE)


def started(folder, *, fills=False):
  """Returns a conversion that has made its folder, and has begun to fill it; and the folder."""
  before = set(folder.glob(".made.*"))
  process = start("--from=hf", "--path=theirs")
  end = time.monotonic() + 60
  while not (found := set(folder.glob(".made.*")) - before) or (
    fills and not list(found.copy().pop().glob("content/checkpoints"))
  ):
    assert process.poll() is None and time.monotonic() < end
    time.sleep(0.002)
  return process, found.pop()


def names(folder):
  return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_it_prints_one_line_and_takes_relative_paths(folder):
  for flags, to, expected in (
    (("--from=hf", "--path=theirs"), "made", SUMMARY),
    (("--from=paxlike", "--path=made"), "back", f"back: 21 weights in float32\n{NO_TOKENIZER}"),
  ):
    process = start(*flags, to=to)
    assert process.communicate() == (expected, "")
    assert process.returncode == 0
  assert names(folder) == ["back", "made", "theirs"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_is_left(folder, number):
  if signal.getsignal(number) is signal.SIG_IGN:
    pytest.skip("ignored here, and so by what is started")
  process, _ = started(folder)
  process.send_signal(number)
  assert process.communicate() == ("", "")
  assert process.returncode == 128 + number
  assert names(folder) == ["theirs"]


@pytest.mark.slow
def test_what_a_killed_one_left_is_removed_by_the_next_but_not_what_another_writes(folder, capfd):
  killed, left = started(folder)
  killed.kill()
  killed.communicate()
  stopped, living = started(folder, fills=True)
  assert not left.exists()
  stopped.send_signal(signal.SIGSTOP)
  foreign = folder / ".made.1234567"
  foreign.mkdir()
  (foreign / "lock").write_text("another machine")
  mine = folder / ".made.notes"
  mine.mkdir()
  assert run(["--from=hf", "--path=theirs", "--to=made"]) == 0
  assert capfd.readouterr().out == SUMMARY
  assert foreign.exists() and mine.exists() and living.exists()
  stopped.send_signal(signal.SIGCONT)
  _, error = stopped.communicate()
  assert stopped.returncode == 2 and error.count("\n") == 1 and "--to=made cannot be" in error
  assert names(folder) == [".made.1234567", ".made.notes", "made", "theirs"]


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_said_and_nothing_is_left(folder):
  limited = ("bash", "-c", 'ulimit -f 5; exec "$@"', "-")  # Of 1024 bytes.
  process = start("--from=hf", "--path=theirs", to="new/made", before=limited)
  _, error = process.communicate()
  assert process.returncode == 2
  assert error == "paxlike-convert: --to=new/made cannot be written: File too large.\n"
  assert names(folder) == ["theirs"]


@pytest.mark.slow
def test_who_reads_the_output_may_stop(folder):
  reader, writer = os.pipe()
  os.close(reader)
  process = start("--from=hf", "--path=theirs", "--dry_run", stdout=writer)
  os.close(writer)
  _, error = process.communicate()
  assert (process.returncode, error) == (0, "")


@pytest.mark.parametrize("to", ["there", "link", "dangling", "/", "."])
def test_a_folder_that_is_there_is_never_written_nor_removed(folder, to):
  (folder / "there").mkdir()
  (folder / "there" / "mine").touch()
  (folder / "link").symlink_to("there")
  (folder / "dangling").symlink_to("nowhere")
  before = names(folder)
  with (
    pytest.raises(UserError, match=f"--to={to} (is|already)"),
    new_folder.filling(pathlib.Path(to), flag="to"),
  ):
    pass
  assert names(folder) == before and os.path.exists("/etc")


@pytest.mark.parametrize("more", [(), ("--dry_run",)])
@pytest.mark.parametrize(
  ("flags", "to", "said"),
  [
    (("--from=hf",), "made[1]", "--to=made[1]: checkpoints cannot be written in a folder with ["),
    (("--from=hf",), "theirs", "--to=theirs already exists"),
    (
      ("--from=hf", "--step=7"),
      "made",
      "--step goes with --from=paxlike or --from=max",
    ),
    (
      ("--from=hf", "--step=0"),
      "made",
      "--step goes with --from=paxlike or --from=max",
    ),
    (
      ("--from=meta", "--fdl_allow_modules=x"),
      "made",
      "--fdl_allow_modules goes with --from=paxlike or --from=peft or --from=hf: ",
    ),
    (("--from=hf", "--fdl_allow_modules=a..b"), "made", "--fdl_allow_modules=a..b: expected names"),
    (("--from=meta", "--base=x"), "made", "--base goes with --from=paxlike or --from=peft"),
    (("--from=peft", "--adapter", "--base=x"), "made", "--adapter goes with --from=paxlike: "),
    (("--from=peft",), "made", "--from=peft needs --base=DIR"),
  ],
)
def test_a_command_line_that_cannot_be_is_refused(folder, capsys, flags, to, said, more):
  assert run([*flags, "--path=theirs", f"--to={to}", *more]) == 2
  out, error = capsys.readouterr()
  assert said in error and error.count("\n") == 1 and not out
  assert names(folder) == ["theirs"]


def test_folders_made_on_the_way_are_removed_when_it_fails(folder):
  with (
    pytest.raises(UserError, match="--to=a/b/c cannot be written"),
    new_folder.filling(pathlib.Path("a/b/c"), flag="to") as made,
  ):
    (made / "file").touch()
    raise OSError("no more")
  assert names(folder) == ["theirs"]


def test_what_a_late_write_creates_anew_is_removed(folder):
  late = threading.Timer(0.3, lambda: (made / "state").mkdir(parents=True))
  with (
    pytest.raises(UserError, match="--to=a/b cannot be written"),
    new_folder.filling(pathlib.Path("a/b"), flag="to") as made,
  ):
    late.start()
    raise OSError("no more")
  late.join()
  assert names(folder) == ["theirs"]


def test_a_message_is_one_line_whatever_files_say():
  assert one_line("a\nb\x1b[2J\u202e\tc") == r"a b\x1b[2J\u202e\tc"
  assert len(one_line("x" * 10**6)) < 3000
