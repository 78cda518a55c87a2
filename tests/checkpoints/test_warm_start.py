# SPDX-License-Identifier: Apache-2.0
"""A run that starts from the weights of another."""

import json

import jax
import numpy as np
import pytest
from helpers.program import TINY, run

from paxlike.checkpoints import layout_conversion
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.config import graph_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  folder = tmp_path_factory.mktemp("source") / "run"
  assert run(*TINY, f"--job_log_dir={folder}", "--fdl.MAX_STEPS=2") == 0
  return folder


def params(folder):
  import fiddle as fdl

  trainer = fdl.build(graph_file.read(folder / "config.json"))
  return {name: np.asarray(value) for name, value in trainer.load(folder).items()}


def start(folder, source, *more, steps=1):
  """The rate of the first step is 0."""
  origin = f"--fdl.CHECKPOINT_RESTORE_PATH={source}"
  return run(*TINY, f"--job_log_dir={folder}", f"--fdl.MAX_STEPS={steps}", origin, *more)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_all_weights_are_those_of_the_source(tmp_path, source, scan, inner):
  layout = f"--fdl.USE_REPEATED_LAYER={scan}"
  assert start(tmp_path / "new", source / inner, layout) == 0
  expected, got = params(source), params(tmp_path / "new")
  by_name = {name.replace("layers.0", "pattern.0"): value for name, value in expected.items()}
  for name, value in got.items():
    np.testing.assert_array_equal(
      value.squeeze(), by_name[name.replace("layers.0", "pattern.0")].squeeze()
    )
  origin = json.loads((tmp_path / "new" / "restored_from.json").read_text())
  assert (origin["path"], origin["step"]) == (str(source / "checkpoints"), 2)
  assert origin["restored"] == list(got) and origin["initialized"] == []


def test_rules_choose_what_is_restored(tmp_path, source):
  rules = (
    "--fdl.CHECKPOINT_INCLUDE_RULES=[stack,embedding]",
    "--fdl.CHECKPOINT_IGNORE_RULES=[mlp]",
  )
  assert start(tmp_path / "new", source, *rules) == 0
  assert start(tmp_path / "drawn", source, "--fdl.CHECKPOINT_RESTORE_PATH=None") == 0
  old, got, drawn = params(source), params(tmp_path / "new"), params(tmp_path / "drawn")
  origin = json.loads((tmp_path / "new" / "restored_from.json").read_text())
  for name, value in got.items():
    taken = ("stack" in name or "embedding" in name) and "mlp" not in name
    assert (name in origin["restored"]) == taken
    assert (name in origin["initialized"]) != taken
    np.testing.assert_array_equal(value, (old if taken else drawn)[name])


def test_a_restart_goes_on_and_is_not_restored_again(tmp_path, source):
  assert start(tmp_path / "new", source, steps=2) == 0
  trained = params(tmp_path / "new")
  assert start(tmp_path / "new", source, steps=2) == 0
  for name, value in params(tmp_path / "new").items():
    np.testing.assert_array_equal(value, trained[name])


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (("--fdl.CHECKPOINT_RESTORE_PATH=/nowhere",), "no checkpoint in /nowhere"),
    (("--fdl.CHECKPOINT_RESTORE_STEP=7",), "no checkpoint 7"),
    (("--fdl.CHECKPOINT_INCLUDE_RULES=[nothing]",), "leave no weight"),
    (("--fdl.CHECKPOINT_IGNORE_RULES=['(']",), "is not a regular expression"),
    (("--fdl.HIDDEN_DIMS=32",), "float32[16, 64] in the checkpoint, float32[16, 32]"),
  ],
)
def test_what_cannot_be_restored_is_said_and_nothing_is_left(tmp_path, source, flags, said, capsys):
  assert start(tmp_path / "new", source, *flags) == 2
  assert said in capsys.readouterr().err
  assert not (tmp_path / "new").exists()


def test_other_float_dtypes_and_meshes_are_converted(tmp_path, source):
  mesh = "--fdl.ICI_MESH_SHAPE=[1,4,2]"
  assert start(tmp_path / "new", source, mesh) == 0
  with Checkpoints(tmp_path / "new" / "checkpoints", keep=None) as saved:
    name = "params.embedding.table"
    stored = saved.at(1).read(name)
    half = jax.ShapeDtypeStruct(
      stored.shape, np.float16, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    layout = saved.at(1).layout()
    restored = (
      saved.at(1)
      .restore({name: half}, layout=layout, unread=layout_conversion.anything)
      .state[name]
    )
  assert restored.dtype == np.float16
  np.testing.assert_array_equal(restored, stored.astype(np.float16))
  np.testing.assert_array_equal(stored, params(source)["embedding.table"])
