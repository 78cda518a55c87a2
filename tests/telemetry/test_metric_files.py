# SPDX-License-Identifier: Apache-2.0
import json
import struct
from typing import Any

from tensorboardX.proto import event_pb2 as untyped

from paxlike.telemetry import metric_files

event_pb2: Any = untyped


def record(updates, **values):
  return {"kind": "train", "updates": updates, **values}


def test_a_resumed_file_has_no_step_twice_and_no_broken_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = metric_files.JsonlWriter(path, step=0)
  for updates in range(1, 8):
    writer.write(record(updates))
  writer.close()
  path.write_text(path.read_text() + '{"kind": "train", "upda')
  writer = metric_files.JsonlWriter(path, step=5)
  writer.write(record(6, again=True))
  writer.close()
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert [r["updates"] for r in records] == [1, 2, 3, 4, 5, 6]
  assert records[-1]["again"]


def test_what_is_not_finite_is_null(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = metric_files.JsonlWriter(path, step=0)
  writer.write(record(1, a=float("nan"), b=float("inf"), c=1.5, d=None, e="text"))
  writer.close()
  (got,) = metric_files.read(path)
  assert (got["a"], got["b"], got["c"], got["d"], got["e"]) == (None, None, 1.5, None, "text")


def test_tensorboard_files_are_made_with_the_first_scalar(tmp_path):
  writer = metric_files.TensorBoardWriter(tmp_path / "train")
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
    writer = metric_files.TensorBoardWriter(tmp_path, first=first)
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
