# SPDX-License-Identifier: Apache-2.0
"""MLflow: a tracking server or a local database (MLFLOW_TRACKING_URI)."""

import contextlib
import getpass
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paxlike.telemetry.trackers.tracker import Record, TrackedRun, Tracker, newest

_TAG = "paxlike_run"  # The tag by which a restart finds its run.
_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 1000, 100, 6000  # Limits of a request.
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow(Tracker):
  """A run of MLflow, in the experiment TRACKER_PROJECT or MLFLOW_EXPERIMENT_NAME.

  Knobs are parameters, which MLflow does not let change: a value that another start has changed is
  a tag, `changed.KNOB`. Configuration files, environments and texts are artifacts.
  """

  library = "mlflow"

  def open(self, run: TrackedRun) -> Mapping[str, int]:
    import mlflow

    self._client = mlflow.MlflowClient()
    self._experiment = self._find_experiment(run.project)
    found = self._client.search_runs([self._experiment], f"tags.{_TAG} = '{run.id}'")
    if found:
      own = found[0]
      self._client.update_run(own.info.run_id, status="RUNNING")
    else:
      tags = {_TAG: run.id}
      # In containers, the process's user may have no entry in passwd.
      with contextlib.suppress(KeyError, OSError, ImportError):
        tags["mlflow.user"] = getpass.getuser()
      own = self._client.create_run(self._experiment, tags=tags, run_name=run.name)
    self._id = own.info.run_id
    self._describe(run, own.data.params)
    return newest(own.data.metrics)

  def _find_experiment(self, project: str | None) -> str:
    """Returns the id of the experiment, created if missing."""
    if project is None and (number := os.environ.get("MLFLOW_EXPERIMENT_ID")):
      return number
    name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "paxlike")
    found = self._client.get_experiment_by_name(name)
    return self._client.create_experiment(name) if found is None else found.experiment_id

  def _describe(self, run: TrackedRun, params: Mapping[str, str]):
    """Uploads knobs, facts and files; `params` are those that the run has."""
    from mlflow.entities import Param, RunTag

    knobs = {name: str(value)[:_MOST_CHARACTERS] for name, value in run.knobs.items()}
    new = [Param(name, value) for name, value in knobs.items() if name not in params]
    for some in _batches(new, _MOST_PARAMS):
      self._client.log_batch(self._id, params=some)
    tags = [
      RunTag(f"changed.{name}", value)
      for name, value in knobs.items()
      if params.get(name, value) != value
    ]
    if commit := run.facts.get("git_commit"):
      tags.append(RunTag("mlflow.source.git.commit", str(commit)))
    self._client.log_batch(self._id, tags=tags)
    self._client.log_dict(self._id, dict(run.facts), f"environment/{run.step:08d}.json")
    for name, content in run.files.items():
      text = content if isinstance(content, str) else content.decode()
      self._client.log_text(self._id, text, name)

  def where(self) -> str:
    import mlflow

    uri = mlflow.get_tracking_uri()
    page = f"/#/experiments/{self._experiment}/runs/{self._id}"
    return f"{uri.rstrip('/')}{page}" if uri.startswith("http") else f"{uri}, run {self._id}"

  def write(self, record: Record):
    from mlflow.entities import Metric

    time, step = round(record.time * 1000), record.updates
    if record.texts:
      self._client.log_dict(self._id, dict(record.texts), f"{record.part}/{step:08d}.json")
    metrics = [Metric(_valid(name), value, time, step) for name, value in record.named().items()]
    for some in _batches(metrics, _MOST_METRICS):
      self._client.log_batch(self._id, some)

  def close(self, status: str):
    self._client.set_terminated(self._id, _STATES[status])


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
  """Yields the items in order, at most `size` at a time."""
  return (items[start : start + size] for start in range(0, len(items), size))


def _valid(name: str) -> str:
  """Returns a metric's name with only the characters that MLflow accepts."""
  return re.sub(r"[^\w\-./ ]", "_", name)
