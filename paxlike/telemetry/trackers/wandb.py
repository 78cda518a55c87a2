# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, online or offline (`WANDB_MODE=offline`)."""

import html
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from paxlike import file_io
from paxlike.errors import UserError
from paxlike.telemetry.trackers.tracker import Record, TrackedRun, Tracker, newest

_FINISH_SECONDS = 20.0  # Time-out for the last uploads.


class Wandb(Tracker):
  """A run of Weights & Biases, whose steps are completed optimizer steps.

  Its files are in `wandb/` of the run's folder if that is local and WANDB_DIR is not set.
  """

  library = "wandb"

  @classmethod
  def check(cls):
    super().check()
    import wandb

    try:
      is_ready = wandb.setup().settings.mode != "online" or wandb.login(verify=False, prompt=False)
    except wandb.Error as error:
      raise UserError(f"wandb: {file_io.reason(error)}.") from error
    if not is_ready:
      raise UserError(
        "wandb: no account is logged in. Run `wandb login`, or set WANDB_API_KEY or"
        " WANDB_MODE=offline."
      )

  def open(self, run: TrackedRun) -> Mapping[str, int]:
    import wandb

    in_folder = "WANDB_DIR" not in os.environ and not file_io.is_remote(run.folder)
    self._run = wandb.init(
      id=run.id,
      resume="allow",
      reinit="finish_previous",  # After an error.
      project=run.project or os.environ.get("WANDB_PROJECT", "paxlike"),
      name=os.environ.get("WANDB_NAME", run.name),
      dir=os.fspath(run.folder) if in_folder else None,
      config={**run.knobs, "run": dict(run.facts)},
      settings=wandb.Settings(
        # It would wrap the standard output of the whole program.
        console=os.environ.get("WANDB_CONSOLE", "off"),  # pyright: ignore[reportArgumentType]
        finish_timeout=_FINISH_SECONDS,
        finish_timeout_raises=True,
        silent=True,
      ),
    )
    for name, content in run.files.items():
      path = pathlib.Path(self._run.dir, name)
      path.write_bytes(content.encode() if isinstance(content, str) else content)
      self._run.save(path, base_path=self._run.dir, policy="now", glob=False)
    self._step = self._run.step
    if not self._run.offline:
      return newest(dict(self._run.summary))
    # Nothing resumes offline: each start has a folder of its own, to be uploaded to one run.
    starts = sorted({*self._folder.parent.glob(f"*run-*-{run.id}")} - {self._folder})
    return {part: updates for start in starts for part, updates in newest(_summary(start)).items()}

  @property
  def _folder(self) -> pathlib.Path:
    """The folder of this start."""
    return pathlib.Path(self._run.dir).parent

  def where(self) -> str:
    if self._run.offline:
      return f"offline; to upload: wandb sync {self._folder}"
    return str(self._run.url)

  def write(self, record: Record):
    import wandb

    values: dict[str, Any] = record.named()
    for name, text in record.texts.items():
      values[f"{record.part}/{name}"] = wandb.Html(f"<pre>{html.escape(text)}</pre>")
    # An evaluation that a restart makes up for may come after the row of its step was sent.
    self._step = max(self._step, record.updates)
    self._run.log(values, step=self._step)

  def close(self, status: str):
    self._run.finish(exit_code=int(status == "failed"))


def _summary(folder: pathlib.Path) -> Mapping[str, Any]:
  """Returns the newest values in the files of one start, which may have been killed."""
  command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
  return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["summary"]
