# SPDX-License-Identifier: Apache-2.0
"""The cache: made once, by one of several processes, and never half."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from paxlike.data import token_index
from paxlike.errors import UserError

DOCUMENTS = [np.array([5, 6, 7], np.int32), np.array([], np.int32), np.array([8], np.int32)]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
  folder = tmp_path / "cache"
  monkeypatch.setenv("PAXLIKE_CACHE", str(folder))
  return folder


def never():
  raise AssertionError("made although it is there")


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_index_holds_the_documents(cache, vocab_size, dtype):
  documents = [*DOCUMENTS, np.array([vocab_size - 1], np.int32)]
  made = token_index.cached("key", lambda: documents, vocab_size=vocab_size)
  found = token_index.cached("key", never, vocab_size=vocab_size)
  for index in (made, found):
    assert index.tokens.dtype == dtype and index.offsets.dtype == np.int64
    assert index.tokens.tolist() == [5, 6, 7, 8, vocab_size - 1]
    assert index.offsets.tolist() == [0, 3, 3, 4, 5]
  assert made.fingerprint() == found.fingerprint()


@pytest.mark.parametrize("documents", [[], [np.array([], np.int32)]])
def test_index_may_be_empty(cache, documents):
  for _ in range(2):
    index = token_index.cached("key", lambda: documents, vocab_size=10)
    assert len(index.tokens) == 0 and len(index.offsets) == len(documents) + 1


def test_keys_and_vocabularies_are_kept_apart(cache):
  for key, size in (("a", 10), ("b", 10), ("a", 11)):
    index = token_index.cached(key, lambda s=size: [np.array([s], np.int32)], vocab_size=size + 1)
    assert index.tokens.tolist() == [size]
  assert len([path for path in (cache / "tokens").iterdir() if path.is_dir()]) == 3


def test_fingerprint_tells_content_and_cuts_apart():
  def fingerprint(tokens, offsets):
    return token_index.TokenIndex(np.array(tokens, np.uint16), np.array(offsets)).fingerprint()

  found = {fingerprint([1, 2, 3], [0, 3]), fingerprint([1, 2, 3], [0, 1, 3])}
  assert len(found | {fingerprint([1, 2, 4], [0, 3])}) == 3


def test_folder_follows_the_environment(monkeypatch, tmp_path):
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path / "own"))
  assert token_index.cache_folder() == tmp_path / "own"
  monkeypatch.delenv("PAXLIKE_CACHE")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert token_index.cache_folder() == tmp_path / "paxlike"
  monkeypatch.delenv("XDG_CACHE_HOME")
  assert token_index.cache_folder() == pathlib.Path.home() / ".cache" / "paxlike"


def test_failed_build_leaves_nothing_that_counts(cache):
  def fails():
    yield DOCUMENTS[0]
    raise UserError("line 2 is bad")

  with pytest.raises(UserError, match="line 2 is bad"):
    token_index.cached("key", fails, vocab_size=10)
  assert token_index.cached("key", lambda: DOCUMENTS, vocab_size=10).tokens.tolist() == [5, 6, 7, 8]


BUILD = """
import pathlib, sys, time
import numpy as np
from paxlike.data import token_index

log, seconds, count = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])

def documents():
  with log.open("a") as file:
    file.write("began\\n")
  for number in range(count):
    time.sleep(seconds)
    yield np.arange(number * 1000, dtype=np.int32)

tokens = token_index.cached("key", documents, vocab_size=2**20).tokens
print(len(tokens), int(tokens[-1]))
"""


def build(log: pathlib.Path, *, seconds: float, count: int) -> subprocess.Popen[str]:
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
  command = [sys.executable, "-c", BUILD, str(log), str(seconds), str(count)]
  return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def wait_for(log: pathlib.Path):
  deadline = time.monotonic() + 60
  while not log.exists():
    assert time.monotonic() < deadline, "the build never began"
    time.sleep(0.01)


def test_killed_build_is_made_again(cache, tmp_path):
  log = tmp_path / "log"
  with build(log, seconds=0.05, count=1000) as process:
    wait_for(log)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
  assert process.returncode == -signal.SIGKILL
  assert [path for path in (cache / "tokens").iterdir() if path.is_dir()]  # Left half-made.
  index = token_index.cached("key", lambda: DOCUMENTS, vocab_size=2**20)
  assert index.tokens.tolist() == [5, 6, 7, 8]
  names = {path.name.partition(".")[2] for path in (cache / "tokens").iterdir()}
  assert names == {"", "lock"}


def test_several_processes_build_once(cache, tmp_path):
  log = tmp_path / "log"
  processes = [build(log, seconds=0.1, count=5) for _ in range(3)]
  outputs = {process.communicate(timeout=120)[0] for process in processes}
  assert outputs == {"10000 3999\n"}
  assert log.read_text() == "began\n"


def test_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path / "file" / "cache"))
  with pytest.raises(UserError, match=f"{tmp_path}/file/cache.*cannot be written.*PAXLIKE_CACHE"):
    token_index.cached("key", never, vocab_size=10)


def test_full_disk_is_told(cache, monkeypatch):
  def full(*unused, **ignored):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(np, "save", full)
  with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
    token_index.cached("key", lambda: DOCUMENTS, vocab_size=10)


@pytest.mark.parametrize("name", ["offsets.npy", "tokens"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "junk"])
def test_damaged_cache_is_named(cache, name, damage):
  token_index.cached("key", lambda: DOCUMENTS, vocab_size=10)
  (path,) = cache.glob(f"tokens/*/{name}")
  if damage == "missing":
    path.unlink()
  else:
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[:-1], "junk": b"\x93NUMPYjunk"}[damage])
  with pytest.raises(UserError, match=f"cannot be read .*remove {path.parent}"):
    token_index.cached("key", never, vocab_size=10)
