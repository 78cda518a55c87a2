# SPDX-License-Identifier: Apache-2.0
"""Prints what trackers have of the runs in their projects, read by their own libraries, as JSON.

    python -m helpers.read_trackers RUN

RUN is the folder of a run, whose `wandb/` has files of W&B. MLFLOW_TRACKING_URI and TRACKIO_DIR
name the databases of the others.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


def wandb(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the records of each start, in order."""
  for start in sorted(folder.glob("wandb/*run-*-*")):
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(start)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    (own,) = [one["run"] for one in records if one["type"] == "run"] or [{}]
    yield {
      "id": own.get("run_id"),
      "project": own.get("project"),
      "config": own.get("config", {}).get("update"),
      "history": [one["history"]["item"] for one in records if one["type"] == "history"],
      "files": [file["path"] for one in records for file in one.get("files", {}).get("files", ())],
    }


def mlflow() -> Iterator[dict[str, Any]]:
  """Yields the runs of all experiments."""
  import mlflow

  client = mlflow.MlflowClient()
  for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
      number = run.info.run_id
      yield {
        "project": experiment.name,
        "name": run.info.run_name,
        "status": run.info.status,
        "params": run.data.params,
        "tags": run.data.tags,
        "history": {
          name: [(point.step, point.value) for point in client.get_metric_history(number, name)]
          for name in run.data.metrics
        },
        "artifacts": {
          path: pathlib.Path(client.download_artifacts(number, path)).read_text()
          for path in _files(client, number)
        },
      }


def _files(client: Any, number: str, folder: str | None = None) -> Iterator[str]:
  for one in client.list_artifacts(number, folder):
    if one.is_dir:
      yield from _files(client, number, one.path)
    else:
      yield one.path


def trackio(project: str = "paxlike") -> Iterator[dict[str, Any]]:
  """Yields the runs of a project."""
  import trackio
  from trackio.sqlite_storage import SQLiteStorage

  for run in trackio.Api().runs(project):
    logs = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
    yield {"name": run.name, "config": run.config, "history": logs}


def main(folder: str):
  """Prints all as one line."""
  with contextlib.redirect_stdout(sys.stderr):
    found = {
      "wandb": list(wandb(pathlib.Path(folder))),
      "mlflow": list(mlflow()),
      "trackio": list(trackio()),
    }
  print(json.dumps(found, default=str))


if __name__ == "__main__":
  main(sys.argv[1])
