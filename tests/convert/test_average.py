# SPDX-License-Identifier: Apache-2.0
"""`paxlike-average`: the mean of a run's checkpoints, in a folder that every mode takes."""

import json

import jax
import numpy as np
import pytest
from helpers import program
from helpers.saved_arrays import save

import paxlike
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.convert import average, streaming
from paxlike.convert.main import run as convert
from paxlike.layers.stack_layout import Layout

UNROLLED = Layout(scanned=False, repeats=4)
STACKED = Layout(scanned=True, repeats=4)
PIPELINED = Layout(scanned=True, repeats=4, stages=3)  # Its leading dim has padding.


def state(step, layout):
  random = np.random.default_rng(step)
  table, w = random.normal(size=(6, 4)), random.normal(size=(layout.repeats, 2, 4))
  arrays = {"params.table": table, "extra.scale": np.full(2, step), "opt_state.m": table}
  if not layout.scanned:
    arrays |= {f"params.stack.layers.{layer}.w": w[layer] for layer in range(layout.repeats)}
  else:
    padded = [0 * w[0] if repeat is None else w[repeat] for repeat in layout.order]
    arrays["params.stack.pattern.0.w"] = np.stack(padded)
  return {name: jax.numpy.float32(value) for name, value in arrays.items()}


def make_run(folder, *layouts):
  folder.mkdir()
  (folder / "config.json").write_text("{}")
  with Checkpoints(folder / "checkpoints", keep=None) as saved:
    for step, layout in enumerate(layouts, 1):
      save(saved, step, state(step, layout), layout=layout)
  return folder


def stored(folder):
  """Returns the one checkpoint of a folder, and its arrays."""
  saved = Checkpoints(folder / "checkpoints", keep=None)
  (step,) = saved.steps()
  return step, {name: saved.at(step).read(name) for name in saved.at(step).arrays()}


@pytest.mark.parametrize("layout", [UNROLLED, STACKED, PIPELINED], ids=str)
def test_the_mean_is_numpys_whatever_the_layouts(layout, tmp_path, capsys):
  made = make_run(tmp_path / "run", STACKED, UNROLLED, PIPELINED, layout)
  assert average.run([str(made), "--steps=4,1,3", f"--to={tmp_path / 'mean'}"]) == 0
  assert "the mean of checkpoints 1, 3, 4 of" in capsys.readouterr().out
  step, arrays = stored(tmp_path / "mean")
  wanted = [state(step, layout) for step in (1, 3, 4)]
  assert step == 4 and arrays.keys() == wanted[0].keys() - {"opt_state.m"}
  np.testing.assert_array_equal(arrays["extra.scale"], 4)
  for name in arrays.keys() - {"extra.scale"}:
    mean = np.mean([one[name] for one in wanted], 0, dtype=np.float32)
    np.testing.assert_allclose(arrays[name], mean, rtol=1e-6, atol=1e-7)
  assert average.run([str(made), "--last=2", f"--to={tmp_path / 'last'}"]) == 0
  record = json.loads((tmp_path / "last" / average.RECORD).read_text())
  assert record == {"path": str(made), "steps": [3, 4]}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Of Orbax.
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, capsys):
  made = make_run(tmp_path / "run", UNROLLED, UNROLLED)
  other = make_run(tmp_path / "other", UNROLLED, Layout(scanned=False, repeats=2))
  (tmp_path / "empty").mkdir()
  damaged = make_run(tmp_path / "damaged", UNROLLED, UNROLLED)
  for file in (damaged / "checkpoints" / "checkpoint_00000001" / "state").rglob("d/*"):
    file.write_bytes(bytes(file.stat().st_size))
  to = tmp_path / "mean"
  for given, says in (
    ([tmp_path / "none", f"--to={to}"], "is not the folder of a run"),
    ([tmp_path / "empty", f"--to={to}"], "is not the folder of a run"),
    ([made, "--steps=1,7", f"--to={to}"], "--steps=7: "),
    ([made, "--steps=1,a", f"--to={to}"], "expected steps"),
    ([made, "--steps=2", f"--to={to}"], "an average needs at least 2 checkpoints; there: 2."),
    ([made, "--last=3", f"--to={to}"], "an average needs 3 checkpoints; there: 1, 2."),
    ([made, "--last=1", f"--to={to}"], "--last=1: "),
    ([made, "--last=2", "--steps=1,2", f"--to={to}"], "not allowed with"),
    ([made, f"--to={tmp_path / 'other'}"], "already exists: name a new folder"),
    ([other, f"--to={to}"], "is of another experiment"),
    ([damaged, f"--to={to}"], "checkpoint_00000001 is damaged"),
  ):
    assert average.run([str(one) for one in given]) == 2, given
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("paxlike-average: ") and err.count("\n") == 1
    assert says in err, err
    assert not to.exists() and not list(tmp_path.glob(".*")), given


KNOBS = {
  "MAX_STEPS": 3,
  "CHECKPOINT_EVERY_N_STEPS": 1,
  "ICI_MESH_SHAPE": [2, 4, 1],
  "USE_REPEATED_LAYER": True,
  "TRAIN_SHARE": 0.5,
}


def train(folder, **more):
  (folder.parent / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(99)))
  knobs = KNOBS | {"DATA_PATH": folder.parent / "text.txt"} | more
  flags = [f"--fdl.{name}={value}" for name, value in knobs.items()]
  assert program.run(*program.TEXT, f"--job_log_dir={folder}", *flags) == 0
  return Checkpoints(folder / "checkpoints", keep=None)


def evaluated(folder):
  assert program.run("--mode=eval", f"--job_log_dir={folder}") == 0
  (file,) = (folder / "eval_out" / "validation").glob("eval_00000003.json")
  return json.loads(file.read_text())["log_pplx"]


@pytest.mark.slow
def test_the_folder_is_evaluated_decoded_exported_and_trained_from(tmp_path, capsys):
  """Of a sharded run with other averages and FP8 scales; of one that trains adapters."""
  saved = train(tmp_path / "run", EMA_HALF_LIVES=[0.5], QUANTIZATION="fp8_delayed")
  mean, by_hand = tmp_path / "mean", tmp_path / "by_hand"
  assert average.run([str(tmp_path / "run"), f"--to={mean}"]) == 0
  of_last = saved.at(3).arrays()
  assert any(name.startswith("extra.") for name in of_last)
  arrays = {name: saved.at(3).read(name) for name in of_last if name.startswith("extra.")}
  for name in (name for name in of_last if name.startswith("params.")):
    arrays[name] = np.mean([saved.at(step).read(name) for step in (1, 2, 3)], 0)
  by_hand.mkdir()
  for name in ("config.json", "experiment.json"):
    (by_hand / name).write_bytes((tmp_path / "run" / name).read_bytes())
  streaming.write(by_hand / "checkpoints", arrays.items(), layout=saved.at(3).layout(), step=3)
  of_mean = evaluated(mean)
  assert of_mean == pytest.approx(evaluated(by_hand), rel=1e-6)
  assert abs(of_mean - evaluated(tmp_path / "run")) > 1e-4
  assert len(paxlike.load(mean).generate("3 squared", max_new_tokens=4)) > 0
  again = f"--fdl_config_file={mean / 'config.json'}"
  assert program.run(again, f"--job_log_dir={mean}") == 2
  assert "has weights but no training state: start a run in a new folder" in capsys.readouterr().err
  theirs = tmp_path / "theirs"
  assert convert(["--from=paxlike", f"--path={mean}", f"--to={theirs}"]) == 0

  lora = {"USE_LORA": True, "LORA_RANK": 1, "CHECKPOINT_RESTORE_PATH": mean}
  saved = train(tmp_path / "tuned", **lora)
  assert average.run([str(tmp_path / "tuned"), "--last=2", f"--to={tmp_path / 'tuned_mean'}"]) == 0
  _, arrays = stored(tmp_path / "tuned_mean")
  assert arrays and all(".lora." in name for name in arrays)
  for name, value in arrays.items():
    wanted = (saved.at(2).read(name) + saved.at(3).read(name)) / 2
    np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-8)
  paxlike.load(tmp_path / "tuned_mean")  # With the weights that the adapters are of.
