# SPDX-License-Identifier: Apache-2.0
"""A start that is refused changes nothing, and damaged side files refuse none."""

import json
import pathlib
import subprocess

import pytest
from helpers.program import TEXT, curve, finish, run, start

from paxlike.cli import plot


def flags(folder, text, *more):
  own = (f"--fdl.DATA_PATH={text}", "--fdl.NUM_LAYERS=1", f"--job_log_dir={folder}")
  return (*TEXT, *own, *more)


def contents(folder):
  return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


LONG = "x" * 40
REFUSED = {
  "data": ("--fdl.RANDOM_SEED=5", "other training data"),
  "model": ("--fdl.HIDDEN_DIMS=16", "of another experiment"),
  "prompt": (f"--fdl.SAMPLE_PROMPT={LONG}", "leaves no room"),
  "path": ("--fdl.DATA_PATH=/nowhere", "/nowhere"),
  "best": ("--fdl.BEST_CHECKPOINT_METRIC=validation/none", "no such metric"),
}


@pytest.mark.slow
def test_a_refused_start_changes_nothing(tmp_path, text, capsys):
  folder, new = tmp_path / "run", tmp_path / "a" / "new"
  assert run(*flags(folder, text, "--fdl.MAX_STEPS=2")) == 0
  decode = (f"--job_log_dir={folder}", "--mode=decode", "--max_new_tokens=2")
  assert run(*decode, "--prompt=a") == 0
  before = contents(folder)
  assert any(path.parent.name == "decode_out" for path in before)
  commands = [
    (flags(folder, text, "--fdl.MAX_STEPS=4", flag), said) for flag, said in REFUSED.values()
  ]
  commands += [((*decode, f"--prompt={LONG}"), "leaves no room")]
  commands += [((*decode, "--prompt=a", "--step=9"), "no checkpoint 9")]
  commands += [((*decode, "--prompt_file=/nowhere"), "--prompt_file=/nowhere")]
  commands += [((f"--job_log_dir={folder}", "--mode=eval", "--step=9"), "no checkpoint 9")]
  commands += [(("--fdl_config=Lambada126M", f"--job_log_dir={new}"), "it is for --mode=eval")]
  short = tmp_path / "short.txt"
  short.write_text("")
  elsewhere = [(f"--fdl.DATA_PATH={short}", "short.txt"), *REFUSED.values()]
  commands += [
    (flags(new, text, "--fdl.MAX_STEPS=2", flag), said)
    for flag, said in elsewhere
    if said not in ("other training data", "of another experiment")
  ]
  for command, said in commands:
    capsys.readouterr()
    assert run(*command) == 2, command
    err = capsys.readouterr().err
    told = [line for line in err.splitlines() if not line.startswith("tokenizing ")]
    assert len(told) == 1 and told[0].startswith("paxlike: ") and said in told[0], err
    assert contents(folder) == before, command
    assert not new.parent.exists(), command


@pytest.mark.slow
def test_damaged_side_files_refuse_no_run(tmp_path, text, capsys):
  more = ("--fdl.BEST_CHECKPOINT_METRIC=validation/log_pplx", "--fdl.EVAL_INTERVAL_STEPS=1")
  more += ("--fdl.CHECKPOINT_EVERY_N_STEPS=1",)
  assert run(*flags(tmp_path, text, "--fdl.MAX_STEPS=1", *more)) == 0
  for done, damage in enumerate((b"", b'\xff\xfe{\n{"a":\n'), 1):
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for path in contents(tmp_path):
      if "checkpoints" not in path.parts:
        path.write_bytes(damage)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([lines[0], damage, *lines[1:]]))
    capsys.readouterr()
    updates = list(range(1, done + 1))
    assert plot.read(str(tmp_path), name="a").loss.updates == updates
    assert run(*flags(tmp_path, text, f"--fdl.MAX_STEPS={done + 1}", *more)) == 0
    out, err = capsys.readouterr()
    assert f"resuming from checkpoint {done}" in out
    assert "best.json is damaged" in err and "Traceback" not in err
    assert ("metrics.jsonl is damaged (line 2" in err) == bool(damage)
    assert [update for update, _ in curve(tmp_path)] == [*updates, done + 1]
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_a_run_outlives_who_reads_its_output(tmp_path, text, reader):
  """As `paxlike ... | head`, and 2>&1: both are read by what ends at once."""
  process = start(*flags(tmp_path, text, "--fdl.MAX_STEPS=20", "--fdl.SUMMARY_INTERVAL_STEPS=1"))
  reading = subprocess.run(["bash", "-c", reader], stdin=process.stdout, capture_output=True)
  assert reading.returncode == 0
  assert process.stdout is not None and process.stderr is not None
  process.stdout.close()
  process.stderr.close()
  assert process.wait(timeout=300) == 0
  assert len(curve(pathlib.Path(tmp_path))) == 20


@pytest.mark.slow
def test_a_run_goes_on_without_output_and_errors(tmp_path, text):
  command = flags(tmp_path, text, "--fdl.MAX_STEPS=2")
  assert finish(start(*command, redirected=">/dev/full 2>&-"))[0] == 0
  assert len(curve(pathlib.Path(tmp_path))) == 2
  ended = finish(start(*command[:-3], "--mode=show", redirected=">/dev/full"))
  assert ended[0] == 1 and ended[2].count("\n") == 1 and "output cannot be written" in ended[2]
