# SPDX-License-Identifier: Apache-2.0
"""Raw files become TFDS data sets: whole, or not at all, and never done twice."""

import functools
import gzip
import hashlib
import http.server
import json
import pathlib
import re
import subprocess
import sys
import threading
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from helpers.sources import REPOSITORY

from paxlike.cli import tfds_download
from paxlike.cli.tfds_download import Download
from paxlike.data.seqio import fetch, tfds_writer
from paxlike.data.seqio.tfds_writer import Schema
from paxlike.errors import UserError

SCRIPTS = REPOSITORY / "scripts"
TEXT = {"text": (("text",), str)}
SCHEMA = Schema(name="texts:1.0.0", splits=("train", "validation"), fields=TEXT)
pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow's own.


def lines(texts):
  return "".join(json.dumps({"text": text, "meta": 1}) + "\n" for text in texts).encode()


def read(folder, split):
  import tensorflow_datasets as tfds

  builder = tfds.builder_from_directory(folder)
  return [one["text"].decode() for one in tfds.as_numpy(builder.as_dataset(split=split))]  # pyright: ignore


def run(*argv, schema=SCHEMA, urls=None, **known):
  made = Download(schema=schema, urls=urls or {}, **known)
  return tfds_download.main(made, ["download.py", *argv])


@pytest.mark.slow
def test_files_of_every_kind_become_shards(tmp_path, capsys):
  raw = tmp_path / "raw"
  (raw / "train").mkdir(parents=True)
  (raw / "train" / "0.jsonl.zst").write_bytes(zstandard.compress(lines(["a", "b"])))
  (raw / "train" / "1.jsonl").write_bytes(lines(["c"]))
  (raw / "2-train.json.gz").write_bytes(gzip.compress(lines(["d"])))
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "e"}]), raw / "val.parquet")
  (raw / "README.md").write_text("no data")
  assert run(f"--from={raw}", f"--tfds_data_dir={tmp_path}") == 0
  folder = tmp_path / "texts" / "1.0.0"
  assert str(folder) in capsys.readouterr().out
  assert sorted(read(folder, "train")) == ["a", "b", "c", "d"]
  assert read(folder, "validation") == ["e"]
  done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, check=False)
  assert done.returncode == 0
  assert len(list(folder.glob("*.tfrecord-*"))) == 4
  assert run(f"--from={raw}", f"--tfds_data_dir={tmp_path}") == 2
  assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_finished_is_not_written_again(tmp_path):
  files = [tmp_path / f"{number}.jsonl" for number in range(3)]
  for number, file in enumerate(files):
    file.write_bytes(lines([f"text {number}"]))
  files[2].write_bytes(b"{")
  with pytest.raises(UserError, match=r"2\.jsonl:1 is not JSON"):
    tfds_writer.write(SCHEMA, files, tmp_path)
  assert not (tmp_path / "texts" / "1.0.0").exists()
  shards = sorted((tmp_path / "texts").glob("*/*tfrecord-0000[01]*"))
  before = [path.stat().st_mtime_ns for path in shards if not path.name.startswith(".")]
  files[2].write_bytes(lines(["text 2"]))
  files[1].write_bytes(lines(["text 1", "changed"]))
  folder = tfds_writer.write(SCHEMA, files, tmp_path)
  after = [path.stat().st_mtime_ns for path in sorted(folder.glob("*tfrecord-0000[01]*"))]
  assert after[0] == before[0] and after[1] != before[1]
  assert read(folder, "train") == ["text 0", "text 1", "changed", "text 2"]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "content", "says"),
  [
    ("a.jsonl", b'{"txt": "a"}', r"a\.jsonl:1: no string in field text\. It has: txt\."),
    ("a.jsonl", b"[", r"a\.jsonl:1 is not JSON"),
    ("a-test.jsonl", lines(["a"]), r"has no split test, only train, validation"),
    ("a.jsonl.gz", gzip.compress(lines(["a"]), mtime=0)[:-4], r"a\.jsonl\.gz cannot be read"),
    ("a.txt", b"text", r"the suffix of .*a\.txt is not one of \.jsonl"),
  ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line(tmp_path, capsys, name, content, says):
  (tmp_path / name).write_bytes(content)
  assert run(f"--from={tmp_path / name}", f"--tfds_data_dir={tmp_path}") == 2
  error = capsys.readouterr().err.strip()
  assert "\n" not in error and error.startswith("download.py: ")
  assert re.search(says, error)
  assert not (tmp_path / "texts" / "1.0.0").exists()


class Handler(http.server.SimpleHTTPRequestHandler):
  """Serves files and parts of files; one under /cut/ only half at a time."""

  def do_GET(self):
    path = pathlib.Path(self.translate_path(self.path.replace("/cut", "")))
    if not path.is_file():
      self.send_error(404)
      return
    content = path.read_bytes()
    first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
    if first and first >= len(content):
      self.send_error(416)
      return
    self.server.asked.append(first)  # pyright: ignore
    self.send_response(206 if first else 200)
    self.send_header("Content-Length", str(len(content) - first))
    self.end_headers()
    end = first + (len(content) - first) // 2 if "/cut/" in self.path else len(content)
    self.wfile.write(content[first:end])

  def log_message(self, *unused):
    pass


@pytest.fixture
def server(tmp_path):
  (tmp_path / "site").mkdir()
  handler = functools.partial(Handler, directory=str(tmp_path / "site"))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    server.asked = []  # pyright: ignore
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, tmp_path / "site", f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_a_fetch_goes_on_where_it_broke_off(server, tmp_path):
  asked, site, url = server[0].asked, *server[1:]
  content = bytes(range(256)) * 40
  (site / "a.bin").write_bytes(content)
  to = tmp_path / "got" / "a.bin"
  told = []
  with pytest.raises(UserError, match=r"was interrupted.*to resume it"):
    fetch.fetch(f"{url}/cut/a.bin", to)
  assert not to.exists()
  sha256 = hashlib.sha256(content).hexdigest()
  fetch.fetch(f"{url}/a.bin", to, sha256=sha256, progress=told.append)
  assert to.read_bytes() == content and sum(told) == len(content)
  assert asked == [0, len(content) // 2]
  fetch.fetch(f"{url}/a.bin", to)
  assert len(asked) == 2


def test_another_file_than_was_published_is_refused(server, tmp_path):
  _, site, url = server
  (site / "a.bin").write_bytes(b"other")
  with pytest.raises(UserError, match="not the file that was published"):
    fetch.fetch(f"{url}/a.bin", tmp_path / "a.bin", sha256="0" * 64)
  assert list(tmp_path.iterdir()) == [site]


@pytest.mark.slow
def test_what_is_fetched_becomes_a_data_set(server, tmp_path, capsys):
  _, site, url = server
  with zipfile.ZipFile(site / "all.zip", "w") as packed:
    packed.writestr("All/train.jsonl", lines(["a"]))
    packed.writestr("All/val.jsonl", lines(["b"]))
    packed.writestr("All/test.jsonl", b'{"nothing": 1}')
  schema = Schema(
    name="texts:1.0.0", splits=("train", "validation"), passed_over=("test",), fields=TEXT
  )
  urls = {f"{url}/all.zip": "all.zip"}
  assert run(f"--tfds_data_dir={tmp_path}", schema=schema, urls=urls) == 0
  folder = tmp_path / "texts" / "1.0.0"
  assert (read(folder, "train"), read(folder, "validation")) == (["a"], ["b"])
  capsys.readouterr()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a.jsonl", "http://name.invalid/a.jsonl"])
def test_without_network_one_line_names_the_other_form(tmp_path, capsys, url):
  assert run(f"--tfds_data_dir={tmp_path}", urls={url: "a.jsonl"}) == 2
  error = capsys.readouterr().err.strip()
  assert "\n" not in error
  assert f"{url} cannot be downloaded" in error and "download.py --from=PATH" in error
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("download_*.py")))
def test_scripts_tell_what_they_make(script):
  command = [sys.executable, str(SCRIPTS / script), "--help"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert "--from PATH" in done.stdout and "TFDS dataset" in done.stdout
