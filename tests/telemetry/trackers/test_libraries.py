# SPDX-License-Identifier: Apache-2.0
"""A run that is killed and resumed, as W&B (offline), MLflow and Trackio themselves show it."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from helpers.program import TEXT, finish, start
from helpers.sources import REPOSITORY
from helpers.wandb_server import WandbServer

MISSING = [
  name for name in ("wandb", "mlflow", "trackio") if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")

EXPERIMENT = '''
import os
import signal
import sqlite3
import time

import paxlike
from paxlike.experiments.gpt import Text126M


def rows(path):
  try:
    return sqlite3.connect(path).execute("select count(*) from metrics").fetchone()[0]
  except sqlite3.OperationalError:
    return 0


class Kill(paxlike.Callback):
  """Kills the first start after step 8, of which trackers then have some steps."""

  def on_start(self, step, folder):
    self.is_first = step == 0

  def on_step(self, step, metrics):
    if self.is_first and step == 8:
      while not (rows("mlflow.db") and rows("trackio/paxlike.db")):
        time.sleep(0.1)
      os.kill(os.getpid(), signal.SIGKILL)


class Tracked(Text126M):
  def callbacks(self):
    return [Kill()]
'''


def environment(folder: pathlib.Path) -> dict[str, str]:
  return {
    "WANDB_MODE": "offline",
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
    "TRACKIO_DIR": str(folder / "trackio"),
    "PYTHONWARNINGS": "ignore",
  }


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, text):
  """The folder of a run that was killed after step 8 and resumed, and what trackers have of it."""
  folder = tmp_path_factory.mktemp("tracked")
  (folder / "tracked.py").write_text(EXPERIMENT)
  git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
  for command in (["init"], ["add", "tracked.py"], ["commit", "--message=first"]):
    subprocess.run([*git, *command], check=True, cwd=folder, capture_output=True)
  flags = [flag for flag in TEXT if "fdl_config" not in flag]
  flags += ["--fdl_config=tracked.Tracked", f"--fdl.DATA_PATH={text}", "--fdl.NUM_LAYERS=1"]
  flags += ["--fdl.MAX_STEPS=10", "--fdl.CHECKPOINT_EVERY_N_STEPS=4", "--fdl.SAMPLE_PROMPT=1 b"]
  flags += ["--fdl.EVAL_INTERVAL_STEPS=2", "--fdl.TRACKERS=[tensorboard,wandb,mlflow,trackio]"]
  with pytest.MonkeyPatch.context() as patch:
    for name, value in environment(folder).items():
      patch.setenv(name, value)
    statuses = []
    for _ in range(2):
      status, out, err = finish(start(*flags, "--job_log_dir=run", cwd=folder))
      statuses.append(status)
    assert statuses == [-9, 0], err
    command = [sys.executable, "-m", "helpers.read_trackers", "run"]
    path = os.pathsep.join([str(REPOSITORY / "tests"), str(REPOSITORY)])
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, check=True, cwd=folder, env=env, capture_output=True, text=True)
  records = [
    json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
  ]
  return folder, out, records, json.loads(done.stdout.splitlines()[-1])


def points(records, kind: str, name: str) -> list[tuple[int, float]]:
  return [(one["updates"], one[name]) for one in records if one["kind"] == kind]


@pytest.mark.slow
def test_wandb_has_each_record_once_over_both_starts(tracked):
  _, out, records, found = tracked
  starts = found["wandb"]
  rows = [row for one in starts for row in one["history"]]
  for name, kind in (("train/loss", "train"), ("eval_validation/log_pplx", "eval")):
    got = [(row["_step"], row[name]) for row in rows if name in row]
    assert got == points(records, kind, name.split("/")[1])
  last = starts[-1]
  assert last["project"] == "paxlike" and len(starts) == 2
  assert {one["id"] for one in starts} - {None} == {last["id"]}
  assert last["config"]["NUM_LAYERS"] == 1 and len(last["config"]["run"]["git_commit"]) == 40
  assert {"config.json", "experiment.json"} <= set(last["files"])
  assert any(file.startswith("media/html/sample/text") for file in last["files"])
  assert f"-{last['id']}" in out and "tracker wandb: offline; to upload: wandb sync" in out


@pytest.mark.slow
def test_wandb_uploads_what_a_killed_start_has_not_written(tracked):
  """W&B had perhaps written nothing before the kill; its upload then refuses that folder."""
  folder, _, records, found = tracked
  with WandbServer() as server:
    env = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
    for one in sorted((folder / "run" / "wandb").glob("offline-run-*")):
      command = [sys.executable, "-m", "wandb", "sync", str(one)]
      subprocess.run(command, check=True, cwd=folder, env=env, capture_output=True)
  (number,) = server.history
  losses = [(row["_step"], row["train/loss"]) for row in server.history[number]]
  assert losses == points(records, "train", "loss") and number == found["wandb"][-1]["id"]


@pytest.mark.slow
def test_mlflow_has_one_run_with_each_record_once(tracked):
  folder, _, records, found = tracked
  (run,) = found["mlflow"]
  for name, kind in (("train/loss", "train"), ("eval_validation/log_pplx", "eval")):
    got = [tuple(point) for point in run["history"][name]]
    assert got == points(records, kind, name.split("/")[1])
  assert (run["project"], run["name"], run["status"]) == ("paxlike", "run", "FINISHED")
  assert run["params"]["NUM_LAYERS"] == "1"
  config = (folder / "run" / "config.json").read_text()
  assert run["artifacts"]["config.json"] == config
  environments = [json.loads(run["artifacts"][f"environment/{step:08d}.json"]) for step in (0, 4)]
  commit = run["tags"]["mlflow.source.git.commit"]
  assert [one["git_commit"] for one in environments] == [commit, commit] and len(commit) == 40
  (sample,) = [one for one in records if one["kind"] == "sample"]
  assert sample["prompt"] == "1 b"
  texts = json.loads(run["artifacts"]["sample/00000010.json"])
  assert texts == {"prompt": sample["prompt"], "text": sample["text"]}


@pytest.mark.slow
def test_trackio_has_one_run_with_each_record_once(tracked):
  _, _, records, found = tracked
  (run,) = found["trackio"]
  for name, kind in (("train/loss", "train"), ("eval_validation/log_pplx", "eval")):
    got = [(row["step"], row[name]) for row in run["history"] if name in row]
    assert got == points(records, kind, name.split("/")[1])
  assert run["config"]["NUM_LAYERS"] == 1 and len(run["config"]["run"]["git_commit"]) == 40
  (sample,) = [one for one in records if one["kind"] == "sample"]
  (text,) = [row["sample/text"]["_value"] for row in run["history"] if "sample/text" in row]
  assert text == sample["text"]


@pytest.mark.slow
def test_all_trackers_have_the_same_run(tracked):
  folder, _, _, found = tracked
  number = json.loads((folder / "run" / "trackers.json").read_text())["id"]
  assert found["wandb"][-1]["id"] == found["mlflow"][0]["tags"]["paxlike_run"] == number
  assert found["trackio"][0]["name"] == f"run-{number}"
