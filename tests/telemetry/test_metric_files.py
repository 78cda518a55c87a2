# SPDX-License-Identifier: Apache-2.0
import json

from paxlike.telemetry import metric_files


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
