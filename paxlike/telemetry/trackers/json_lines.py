# SPDX-License-Identifier: Apache-2.0
"""JSON lines: `metrics.jsonl`, from which the other trackers get what they lack."""

from collections.abc import Mapping

from paxlike.telemetry import metric_files
from paxlike.telemetry.trackers.tracker import Record, TrackedRun, Tracker


class JsonLines(Tracker):
  """Writes the records of training to `metrics.jsonl`; every run has this tracker."""

  in_folder = True

  def open(self, run: TrackedRun) -> Mapping[str, int]:
    self._writer = metric_files.open_writer(run.folder, step=run.step)
    return {}

  def write(self, record: Record):
    self._writer.write(record.values)

  def sync(self):
    self._writer.sync()

  def close(self, status: str):
    self._writer.close()
