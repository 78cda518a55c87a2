# SPDX-License-Identifier: Apache-2.0
import os
import struct
import subprocess
import sys
from typing import Any

import pytest
from etils import epath
from helpers.sources import REPOSITORY
from tensorboardX.proto import event_pb2 as untyped

from paxlike.telemetry.trackers import tensorboard
from paxlike.telemetry.trackers.tensorboard import TensorBoard, TensorBoardWriter
from paxlike.telemetry.trackers.tracker import Record, TrackedRun

event_pb2: Any = untyped


def test_tensorboard_files_are_made_with_the_first_scalar(tmp_path):
  writer = TensorBoardWriter(tmp_path / "train")
  writer.close()
  assert not (tmp_path / "train").exists()
  writer.write(3, {"loss": 1.0})
  writer.close()
  assert len(list((tmp_path / "train").iterdir())) == 1


def events(folder):
  """The events of all files, in the order of the files."""
  for path in sorted(folder.iterdir()):
    data = path.read_bytes()
    while data:
      # The length and its checksum, the event and its checksum.
      (length,) = struct.unpack_from("<Q", data)
      yield event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]


def shown(folder):
  """The (step, tag) -> value that TensorBoard shows; each is there once."""
  seen = {}
  for event in events(folder):
    if event.session_log.status == event_pb2.SessionLog.START:
      seen = {key: value for key, value in seen.items() if key[0] < event.step}
    for scalar in event.summary.value:
      assert (event.step, scalar.tag) not in seen
      seen[event.step, scalar.tag] = scalar.simple_value
  return seen


def test_tensorboard_sees_the_scalars_and_hides_steps_done_again(tmp_path):
  for first, steps in [(0, range(6)), (4, range(4, 8))]:
    writer = TensorBoardWriter(tmp_path, first=first)
    for step in steps:
      writer.write(step, {"loss": step / 2, "mfu": 0.25})
    writer.close()
  expected = {(step, "loss"): step / 2 for step in range(8)}
  assert shown(tmp_path) == expected | {(step, "mfu"): 0.25 for step in range(8)}


def test_parts_that_count_steps_from_0_and_others_are_resumed_alike(tmp_path):
  folder = epath.Path(tmp_path)
  for step in (0, 2):
    tracker = TensorBoard()
    tracker.open(TrackedRun(id="", name="run", folder=folder, step=step))
    for updates in range(step + 1, step + 5):
      for kind, first in (("train", 0), ("layers", 0), ("eval", 1)):
        one = {"kind": kind, "set": "held", "step": updates - 1 + first, "updates": updates}
        tracker.write(Record.of({**one, "norm": {"mlp": [updates, None]}}))
    tracker.close("stopped")
  for part, first in (("train", 0), ("layers", 0), ("eval_held", 1)):
    values = {(count + first, "norm/mlp/0"): count + 1 for count in range(6)}
    assert shown(tmp_path / "summaries" / part) == values


@pytest.mark.parametrize("is_there", [True, False])
def test_google_s_storage_client_is_imported_when_it_is_used(is_there, tmp_path):
  """tensorboardX would import it at each start of a run."""
  program = f"""if True:
    import sys
    if not {is_there}:
      sys.modules["google.cloud"] = None
    from etils import epath
    from paxlike.telemetry.trackers.tensorboard import TensorBoardWriter
    TensorBoardWriter(epath.Path({str(tmp_path)!r})).write(1, {{"loss": 1.0}})
    from tensorboardX import record_writer
    assert record_writer.GCS_ENABLED == {is_there}
    assert "google.cloud.storage" not in sys.modules
    if {is_there}:
      assert record_writer.storage.Client.__module__ == "google.cloud.storage.client"
  """
  environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_only_opening_changes_the_modules_of_other_threads(tmp_path, monkeypatch):
  tracker = TensorBoard()
  tracker.open(TrackedRun(id="", name="run", folder=epath.Path(tmp_path)))
  monkeypatch.setattr(tensorboard, "_quick_import", None)
  tracker.write(Record.of({"kind": "train", "step": 0, "updates": 1, "loss": 1.0}))
  tracker.close("finished")
