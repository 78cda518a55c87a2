# SPDX-License-Identifier: Apache-2.0
"""W&B online: its own client, and a stub of its server on loopback."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from helpers.sources import REPOSITORY
from helpers.wandb_server import WandbServer

from paxlike.telemetry.trackers import provenance

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed"),
]

# The arguments: the run's folder, the step that it starts from, that it ends with, and how.
PROGRAM = """
import sys
from etils import epath
from paxlike.telemetry.trackers import provenance, recorder, registry

registry.check(["wandb"])
provenance.facts = lambda header: {"git_commit": "of the user"}
folder, (step, last), status = epath.Path(sys.argv[1]), map(int, sys.argv[2:4]), sys.argv[4]
tracking = recorder.Tracking(names=("wandb",), knobs={"NUM_LAYERS": 2, "MESH": (1, 1, 1)})
made = recorder.Recorder(folder, tracking)
made.start(None, {"config.json": "{}"}, step=step)
for updates in range(step + 1, last + 1):
  record = {"step": updates, "updates": updates, "time": 1.0, "loss": 1 / updates}
  made.write({"kind": "train", **record})
  if updates % 2 == 0:
    made.write({"kind": "eval", "set": "held", **record})
if status == "finished":
  made.write({"kind": "sample", "step": last, "updates": last, "time": 1.0, "text": "<b> & so on"})
made.close(status)
print(*made.lines(), sep="\\n")
"""


def start(folder, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
  env = os.environ | {"PYTHONPATH": str(REPOSITORY), "HOME": str(folder.parent)} | environment
  command = [sys.executable, "-c", PROGRAM, str(folder), *arguments]
  return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_run_that_is_resumed_is_one_run_with_each_row_once(tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  with WandbServer() as server:
    account = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
    # From the checkpoint of step 4 on again.
    for arguments in (("0", "6", "stopped"), ("4", "9", "finished")):
      done = start(folder, *arguments, **account)
      assert done.returncode == 0, done.stderr
      assert "failed" not in done.stdout and f"{server.url}/team/paxlike/runs/" in done.stdout
  number = json.loads((folder / provenance.FILE).read_text())["id"]
  assert server.resumed == [number] and list(server.history) == [number]
  rows = server.history[number]
  assert [(row["_step"], row["train/loss"]) for row in rows] == [(n, 1 / n) for n in range(1, 10)]
  evaluated = [row["eval_held/updates"] for row in rows if "eval_held/updates" in row]
  assert evaluated == [2, 4, 6, 8]
  config = server.config[number]
  assert config["NUM_LAYERS"]["value"] == 2 and config["MESH"]["value"] == [1, 1, 1]
  assert config["run"]["value"] == {"git_commit": "of the user"}
  assert server.files["config.json"] == b"{}"
  (page,) = [text for name, text in server.files.items() if name.startswith("media/html/sample")]
  assert b"&lt;b&gt; &amp; so on" in page


def test_a_missing_login_is_named_before_training(tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  done = start(folder, "0", "1", "finished")
  assert done.returncode == 1 and "Run `wandb login`, or set WANDB_API_KEY" in done.stderr
  assert not list(folder.iterdir())
