# SPDX-License-Identifier: Apache-2.0
import os
import struct
import subprocess
import sys
from typing import Any

import pytest
from helpers.sources import REPOSITORY
from tensorboardX.proto import event_pb2 as untyped

from paxlike.telemetry.trackers.tensorboard import TensorBoardWriter

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


def test_tensorboard_sees_the_scalars_and_hides_steps_done_again(tmp_path):
  for first, steps in [(0, range(6)), (4, range(4, 8))]:
    writer = TensorBoardWriter(tmp_path, first=first)
    for step in steps:
      writer.write(step, {"loss": step / 2, "mfu": 0.25})
    writer.close()
  seen = {}
  for event in events(tmp_path):
    if event.session_log.status == event_pb2.SessionLog.START:
      seen = {key: value for key, value in seen.items() if key[0] < event.step}
    for scalar in event.summary.value:
      assert (event.step, scalar.tag) not in seen
      seen[event.step, scalar.tag] = scalar.simple_value
  expected = {(step, "loss"): step / 2 for step in range(8)}
  assert seen == expected | {(step, "mfu"): 0.25 for step in range(8)}


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
