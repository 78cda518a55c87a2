# SPDX-License-Identifier: Apache-2.0
import errno
import json
import os
import re

import pytest
from etils import epath
from helpers import run_headers

from paxlike.errors import UserError
from paxlike.telemetry import metric_files, run_status
from paxlike.telemetry.run_log import RunLog
from paxlike.telemetry.step_metrics import Reading

LINE = re.compile(
  r"completed step: (\d+), seconds: ([\d.]+), TFLOP/s/device: ([\d.]+),"
  r" Tokens/s/device: ([\d.]+), total_weights: (\d+), loss: ([\d.]+)"
)


@pytest.fixture
def header():
  return run_headers.made()


@pytest.fixture
def run_log(header, tmp_path):
  with RunLog(epath.Path(tmp_path)) as run_log:
    run_log.start(header, {"config.txt": "text"}, step=0, num_steps=4)
    yield run_log


def reading(step: int, *causes: str, seconds: float | None = 0.5, skipped: float = 0.0) -> Reading:
  values = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "skipped": skipped}
  return Reading(step, values, 900.0, None if causes else seconds, None, causes)


def test_the_step_line_is_the_one_that_scripts_read(run_log, capsys, tmp_path):
  run_log.step(reading(0, "start", "compilation"), due=False)
  run_log.step(reading(1, seconds=0.4), due=False)
  run_log.step(reading(2, seconds=0.6), due=True)
  (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("completed")]
  match = LINE.match(line)
  assert match is not None, line
  # 1,000 tokens in 0.5 s on two devices; 4 GFLOPs a token with causal attention.
  assert match.groups() == ("2", "0.500", "4.000", "1000.000", "900", "2.000")
  (record,) = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert record["tokens_per_second"] == 2000
  assert record["tflops_per_second_per_device_full"] == 5
  assert record["tflops_per_second_per_device_causal"] == 4
  assert "mfu_full" not in record  # The peak of a CPU is not known.


def test_the_first_line_does_not_pass_compilation_off_as_speed(run_log, capsys):
  run_log.step(reading(0, "start", "compilation"), due=True)
  line = capsys.readouterr().out.splitlines()[-1]
  assert "(with start and compilation)" in line
  assert "TFLOP/s" not in line


def test_nor_a_pause_whose_causes_it_names(run_log, capsys):
  run_log.step(reading(0), due=True)
  run_log.step(reading(1, "evaluation", "saving"), due=False)
  run_log.step(reading(2, "saving", "the profiler's start"), due=True)
  run_log.step(reading(3, "saving"), due=True)
  *_, first, second, third = capsys.readouterr().out.splitlines()
  assert LINE.match(first)
  assert "(with evaluation, saving and the profiler's start)" in second
  assert "TFLOP/s" not in second
  assert "(with saving)" in third


def test_a_run_that_fails_says_so(tmp_path):
  with pytest.raises(ZeroDivisionError), RunLog(epath.Path(tmp_path)) as run_log:
    run_log.status("running", 3)
    _ = 1 / 0
  status = json.loads((tmp_path / "status.json").read_text())
  assert (status["state"], status["step"]) == ("failed", 3)
  assert run_status.state(epath.Path(tmp_path)) == "failed"


def test_a_full_disk_is_named_in_one_line(run_log, tmp_path, monkeypatch):
  def full(*unused):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(metric_files.JsonlWriter, "write", full)
  with pytest.raises(UserError, match=f"{tmp_path} cannot be written: No space left") as error:
    run_log.step(reading(3), due=True)
  assert len(str(error.value).splitlines()) == 1


def files_of(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("place", ["metrics.jsonl", "metrics/part-00000000.jsonl"])
@pytest.mark.parametrize(("make", "says"), [(os.mkfifo, "a pipe or"), (os.mkdir, "a folder")])
def test_what_is_no_file_of_records_is_refused_before_anything_is_written(
  header, tmp_path, place, make, says
):
  (tmp_path / place).parent.mkdir(exist_ok=True)
  make(tmp_path / place)
  (tmp_path / "config.txt").write_text("before")
  refused = pytest.raises(UserError, match=rf"/{place}: .* is {says}.*move it away")
  with refused, RunLog(epath.Path(tmp_path)) as run_log:
    run_log.start(header, {"config.txt": "text"}, step=0, num_steps=4)
  assert files_of(tmp_path) == {"config.txt": b"before"}


def test_a_run_without_steps_left_keeps_what_its_folder_says(header, tmp_path, capsys):
  (tmp_path / "config.txt").write_text("before")
  with RunLog(epath.Path(tmp_path)) as run_log:
    assert run_log.is_past(4, num_steps=3)
    assert not run_log.is_past(4, num_steps=4)
    assert files_of(tmp_path) == {"config.txt": b"before"}
    run_log.start(header, {"config.txt": "text"}, step=4, num_steps=4)
  assert files_of(tmp_path)["config.txt"] == b"before"
  assert capsys.readouterr().out.startswith("nothing to train: checkpoint 4 is beyond")


def test_skipped_steps_are_counted_in_a_row(run_log):
  for step, (skipped, expected) in enumerate([(1, 1), (1, 2), (0, 0), (1, 1)]):
    run_log.step(reading(step, skipped=float(skipped)), due=False)
    assert run_log.skipped_in_a_row == expected


def test_status_tells_whether_the_job_goes_on(run_log, tmp_path):
  folder = epath.Path(tmp_path)
  assert run_status.read(folder) == ("running", 0, 4)
  status = json.loads((tmp_path / "status.json").read_text())
  (tmp_path / "status.json").write_text(json.dumps(status | {"pid": 2**22 + 1}))
  assert run_status.state(folder) == "lost"
  run_log.status("finished", 4)
  assert run_status.read(folder) == ("finished", 4, 4)


def test_evaluations_are_files_too(run_log, tmp_path):
  run_log.evaluated("held", 3, {"log_pplx": 1.5, "num_predictions": 10.0})
  out = json.loads((tmp_path / "eval_out" / "held" / "eval_00000003.json").read_text())
  assert out == {"checkpoint": 3, "log_pplx": 1.5, "num_predictions": 10.0}
  assert (tmp_path / "summaries" / "eval_held").is_dir()
