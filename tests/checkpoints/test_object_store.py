# SPDX-License-Identifier: Apache-2.0
"""Runs whose folder is on an object store: a GCS emulator on loopback."""

import contextlib
import importlib.util
import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import google_crc32c
import pytest
from etils import epath
from helpers import warm_python
from helpers.program import TEXT, curve, finish, start
from helpers.sources import REPOSITORY

from paxlike import file_io, run_folder
from paxlike.errors import RunError, UserError
from paxlike.processes import lease, owner_files
from paxlike.processes.lease import Lease
from paxlike.processes.owner import Owner
from paxlike.telemetry import metric_files, object_store_append
from paxlike.telemetry.run_log import RunLog


class Store:
  """An emulator, asked without the clients that the program uses."""

  def __init__(self, url):
    self.url = url

  def names(self, prefix):
    query = urllib.parse.urlencode({"prefix": prefix})
    with urllib.request.urlopen(f"{self.url}/storage/v1/b/bucket/o?{query}") as answer:
      return sorted(item["name"] for item in json.load(answer).get("items", []))

  def _object(self, name):
    return f"{self.url}/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}"

  def read(self, name):
    with urllib.request.urlopen(f"{self._object(name)}?alt=media") as answer:
      return answer.read()

  def remove(self, name):
    urllib.request.urlopen(urllib.request.Request(self._object(name), method="DELETE")).close()

  def refuse_writes(self):
    with contextlib.suppress(urllib.error.HTTPError):  # Which it begins with.
      urllib.request.urlopen(f"{self.url}/refuse-writes", data=b"")

  def records(self, run):
    parts = [self.read(name) for name in self.names(f"{run}/metrics/")]
    return [json.loads(line) for line in b"".join(parts).splitlines()]


@pytest.fixture
def store(monkeypatch):
  """A store with an empty bucket, which programs that the test starts use for gs://."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  emulator = REPOSITORY / "tests" / "helpers" / "gcs_emulator.py"
  server = subprocess.Popen([sys.executable, emulator, str(port)], stderr=subprocess.DEVNULL)
  url = f"http://127.0.0.1:{port}"
  monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)  # gcsfs, google-cloud-storage
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
  monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")  # TensorStore
  monkeypatch.setenv("FSSPEC_GCS_TOKEN", "anon")
  # This asks by gRPC what kind of bucket it is, which the emulator does not know.
  monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
  while server.poll() is None:
    with socket.socket() as probe:
      if probe.connect_ex(("127.0.0.1", port)) == 0:
        break
    time.sleep(0.05)
  try:
    yield Store(url)
  finally:
    server.terminate()
    server.wait()


def done(process):
  status, out, err = finish(process)
  assert status == 0, err
  return out


def scalars(data):
  """The (step, tag) -> value of an event file, whose checksums must be right."""
  from tensorboardX.proto import event_pb2

  found = {}
  while data:
    (length,) = struct.unpack_from("<Q", data)
    for content, at in [(data[:8], 8), (data[12 : 12 + length], 12 + length)]:
      crc = google_crc32c.value(content)
      masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
      assert struct.unpack_from("<I", data, at) == (masked,)
    event = event_pb2.Event.FromString(data[12 : 12 + length])  # pyright: ignore
    found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    data = data[16 + length :]
  return found


def check_trackio(folder, updates, store):
  """Fails if its database has not one run of the bucket, with each record once."""
  database = sqlite3.connect(folder / "paxlike.db")
  rows = database.execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
  database.close()
  name = f"run-{json.loads(store.read('run/trackers.json'))['id']}"
  seen = [json.loads(values).get("train/updates") for run, values in rows if run == name]
  assert [number for number in seen if number is not None] == updates


@pytest.mark.slow
def test_a_whole_run_works_on_a_bucket(store, text, tmp_path, monkeypatch):
  own = (f"--fdl.DATA_PATH={text}", "--fdl.NUM_LAYERS=1", "--fdl.MAX_STEPS=8")
  own += ("--fdl.CHECKPOINT_EVERY_N_STEPS=2", "--fdl.EVAL_INTERVAL_STEPS=2")
  own += ("--fdl.BEST_CHECKPOINT_METRIC=validation/log_pplx", "--fdl.CHECKPOINT_MAX_TO_KEEP=2")
  here, there = (f"--job_log_dir={place}" for place in (tmp_path / "run", "gs://bucket/run"))
  done(start(*TEXT, *own, here))

  tracked = own
  if has_trackio := importlib.util.find_spec("trackio") is not None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tracked += ("--fdl.TRACKERS=[tensorboard,trackio]",)
  done(start(*TEXT, *tracked, there, "--fdl.num_steps=5"))
  assert [record["updates"] for record in store.records("run")][-1] == 5
  for name in store.names("run/checkpoints/checkpoint_00000005/"):
    store.remove(name)
  job = start(*TEXT, *tracked, there)
  while job.poll() is None and b'"running"' not in store.read("run/status.json"):
    time.sleep(0.1)
  follower = start(*TEXT, *own, there, "--mode=eval", "--continuous")
  assert "resuming from checkpoint 4" in done(job)
  out = done(follower)
  assert "after 8 updates" in out and out.rstrip().endswith("the job has ended")

  records = [r for r in store.records("run") if r["kind"] == "train"]
  assert [(r["updates"], r["loss"]) for r in records] == curve(tmp_path / "run")
  if has_trackio:
    check_trackio(tmp_path / "trackio", [r["updates"] for r in records], store)
  files = store.names("run/summaries/train/")
  assert len(files) == 2  # One for each start.
  losses = {}
  for name in files:
    losses |= {step: v for (step, tag), v in scalars(store.read(name)).items() if tag == "loss"}
  assert losses == pytest.approx({r["step"]: r["loss"] for r in records})
  steps = {name.split("/")[2] for name in store.names("run/checkpoints/checkpoint_")}
  assert "checkpoint_00000008" in steps and "checkpoint_00000002" not in steps
  best = json.loads((tmp_path / "run" / "best.json").read_text())
  assert json.loads(store.read("run/best.json"))["step"] == best["step"]
  assert json.loads(store.read("run/status.json"))["state"] == "finished"
  assert not [name for name in store.names("run/") if "/." in name]

  decode = ("--mode=decode", "--prompt=1 bottles", "--max_new_tokens=4", "--step=best")
  assert "decode_out" in done(start(there, *decode))
  (name,) = store.names("run/decode_out/")
  assert json.loads(store.read(name))["prompt"] == "1 bottles"
  plot = [warm_python.program(), "-m", "paxlike.cli.plot", "gs://bucket/run"]
  subprocess.run(plot, check=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
  assert store.read("run/curves.png").startswith(b"\x89PNG")
  done(start(*TEXT, *own, there, "--mode=profile"))
  assert [name for name in store.names("run/profile/plugins/") if name.endswith(".xplane.pb")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_missing_bucket_is_named_before_anything_is_computed(store, text, mode):
  del store
  flags = (*TEXT, f"--fdl.DATA_PATH={text}", "--job_log_dir=gs://elsewhere/run")
  status, out, err = finish(start(*flags, f"--mode={mode}"))
  assert (status, out) == (2, "")
  lines = [line for line in err.splitlines() if line.startswith("paxlike")]
  assert len(lines) == 1 and "--job_log_dir=gs://elsewhere/run" in lines[0]
  assert "Free space" not in err and "Traceback" not in err, err


@pytest.mark.slow
def test_a_bucket_that_no_longer_takes_objects_ends_the_run_in_one_line(store, text):
  flags = (*TEXT, f"--fdl.DATA_PATH={text}", "--fdl.NUM_LAYERS=1", "--fdl.MAX_STEPS=1000000")
  job = start(*flags, "--job_log_dir=gs://bucket/run")
  while job.poll() is None and not store.names("run/metrics/"):
    time.sleep(0.1)
  store.refuse_writes()
  status, _, err = finish(job)
  assert status == 2 and "Traceback" not in err, err
  [line] = [line for line in err.splitlines() if line.startswith("paxlike")]
  assert "gs://bucket/run cannot be written: " in line
  assert json.loads(store.read("run/status.json"))["state"] == "running"


@pytest.mark.parametrize("refused", [1, 2])
def test_a_write_that_fails_is_an_error_and_not_tried_again(tmp_path, monkeypatch, refused):
  """The first upload is that of the first record, the second that of closing."""
  uploads = []

  def write_bytes(path, data):
    uploads.append(data)
    if len(uploads) == refused:
      raise OSError("out of reach")

  monkeypatch.setattr(file_io, "is_remote", lambda path: True)
  monkeypatch.setattr(type(epath.Path(tmp_path)), "write_bytes", write_bytes)
  with pytest.raises(UserError, match="out of reach"), RunLog(epath.Path(tmp_path)) as run_log:
    for updates in (1, 2):
      record = {
        "kind": "eval",
        "set": "validation",
        "step": updates,
        "updates": updates,
        "loss": 1.0,
      }
      run_log._record(record)
  assert len(uploads) == refused


def test_advice_to_make_room_is_for_full_disks_alone():
  from gcsfs.retry import HttpError

  folder = epath.Path("gs://bucket/run")
  refused = HttpError({"code": 403, "message": "no right to create"})
  with pytest.raises(UserError, match="no right to create") as error, run_folder.writing(folder):
    raise refused
  assert "room" not in str(error.value) and "\n" not in str(error.value)
  with pytest.raises(UserError, match="Free space"), run_folder.writing(folder):
    raise OSError("No space left on device")


def test_records_are_in_few_objects_and_none_is_there_twice(tmp_path, monkeypatch):
  monkeypatch.setattr(metric_files, "MAX_BYTES", 300)
  folder = epath.Path(tmp_path)
  (folder / "metrics").mkdir()
  (folder / "metrics.jsonl").write_text('{"updates": 1}\n{"updates": 2}\n')
  for first, steps in [(2, range(3, 41)), (25, range(26, 61))]:
    monkeypatch.setattr(file_io, "is_remote", lambda path: True)
    writer = metric_files.open_writer(folder, step=first)
    for updates in steps:
      writer.write({"kind": "train", "updates": updates})
    writer.close()
  assert [record["updates"] for record in metric_files.records(folder)] == list(range(1, 61))
  assert 60 * 33 / 300 - 1 < len(os.listdir(tmp_path / "metrics")) < 12
  # Copied to a disk it goes on in one file.
  monkeypatch.undo()
  assert [record["updates"] for record in metric_files.records(folder)] == list(range(1, 61))
  part = min((tmp_path / "metrics").iterdir())
  stale = part.read_text()
  metric_files.open_writer(folder, step=50).close()
  assert [record["updates"] for record in metric_files.records(folder)] == list(range(1, 51))
  assert os.listdir(tmp_path) == ["metrics.jsonl"]
  # Killed before they were all removed; and beside a file of the user's.
  part.parent.mkdir()
  part.write_text(stale)
  (tmp_path / "metrics" / "code.py").write_text("")
  assert [record["updates"] for record in metric_files.records(folder)] == list(range(1, 51))
  metric_files.open_writer(folder, step=50).close()
  assert os.listdir(tmp_path / "metrics") == ["code.py"]


def test_an_object_is_replaced_seldom_and_loses_nothing(tmp_path, monkeypatch):
  now = 0.0
  monkeypatch.setattr(object_store_append.time, "monotonic", lambda: now)
  path = epath.Path(tmp_path / "object")
  file, seen = object_store_append.GrowingFile(path), set()
  for second in range(100):
    now = float(second)
    file.write(b"x")
    file.flush()
    seen.add(len(path.read_bytes()))
  assert len(seen) == 100 / object_store_append.SECONDS
  file.sync()
  assert path.read_bytes() == b"x" * 100


def test_one_process_owns_a_folder_on_a_bucket(store, monkeypatch):
  monkeypatch.setattr(lease, "SILENCE", 2.0)
  folder = epath.Path("gs://bucket/run")
  first = Owner.here(folder)._replace(host="elsewhere", machine="elsewhere", pid=7)
  assert owner_files.create(folder, 1, first)
  assert not owner_files.create(folder, 1, Owner.here(folder))
  owner = Lease(folder)  # After the other has given no sign.
  owner.check()
  with pytest.raises(UserError, match="is in use"):
    Lease(folder)
  assert owner_files.create(folder, 3, first)
  owner._beaten = -1e9
  with pytest.raises(RunError, match="was taken over by process 7 on elsewhere"):
    owner.check()
  owner.release()
  assert store.names("run/") == [f"run/owner_{number:08d}.json" for number in (1, 2, 3)]


@pytest.mark.slow
def test_a_damaged_checkpoint_on_a_bucket_is_passed_over(store, text):
  own = (f"--fdl.DATA_PATH={text}", "--fdl.NUM_LAYERS=1", "--job_log_dir=gs://bucket/run")
  own += ("--fdl.CHECKPOINT_EVERY_N_STEPS=2",)
  done(start(*TEXT, *own, "--fdl.MAX_STEPS=4"))
  prefix = "run/checkpoints/checkpoint_00000004/"
  name = max(store.names(prefix), key=lambda name: len(store.read(name)))
  data = bytearray(store.read(name))
  data[0] ^= 1
  epath.Path(f"gs://bucket/{name}").write_bytes(bytes(data))
  status, out, err = finish(start(*TEXT, *own, "--fdl.MAX_STEPS=6"))
  assert status == 0, err
  assert "resuming from checkpoint 2" in out
  assert f"is damaged ({name.removeprefix(prefix)}, array " in err
