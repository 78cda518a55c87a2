# SPDX-License-Identifier: Apache-2.0
"""Trackio: a local database, a Space (TRACKIO_SPACE_ID) or a server (TRACKIO_SERVER_URL)."""

import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from paxlike.telemetry.trackers.tracker import UPDATES, Record, TrackedRun, Tracker, newest


class Trackio(Tracker):
  """A run of Trackio, in the project TRACKER_PROJECT."""

  library = "trackio"

  def open(self, run: TrackedRun) -> Mapping[str, int]:
    import trackio

    self._run = trackio.init(
      project=run.project or "paxlike",
      name=f"{run.name}-{run.id}",  # Trackio finds a run by its name.
      resume="allow",
      config={**run.knobs, "run": dict(run.facts)},
      embed=False,
    )
    self._upload(run)
    names = [name for name in self._ask("get_metrics_for_run") if name.endswith(UPDATES)]
    rows = {name: self._ask("get_metric_values", metric_name=name, max_points=1) for name in names}
    return newest({name: found[-1]["value"] for name, found in rows.items()})

  def _upload(self, run: TrackedRun):
    """Uploads the configuration files; the same content makes no new version."""
    import trackio

    artifact = trackio.Artifact(f"config-{run.id}", type="config")
    with tempfile.TemporaryDirectory() as folder:
      for name, content in run.files.items():
        path = pathlib.Path(folder, name)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        artifact.add_file(path)
      if run.files:
        self._run.log_artifact(artifact)

  def _ask(self, name: str, **given: Any) -> Any:
    """Returns what a function of Trackio's server says about the run."""
    from huggingface_hub import get_token
    from trackio import remote_client, server

    given |= {"project": self._run.project, "run": self._run.name, "run_id": self._run.id}
    if self._run.url is None:
      return getattr(server, name)(**given)
    client = remote_client.RemoteClient(self._run.url, hf_token=get_token(), verbose=False)
    return client.predict(api_name=f"/{name}", **given)

  def where(self) -> str:
    return self._run.url or f"local; to see it: trackio show --project {self._run.project}"

  def write(self, record: Record):
    import trackio

    texts = {f"{record.part}/{name}": trackio.Markdown(text) for name, text in record.texts.items()}
    self._run.log({**record.named(), **texts}, step=record.updates)

  def close(self, status: str):
    self._run.finish()
