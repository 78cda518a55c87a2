# SPDX-License-Identifier: Apache-2.0
import pytest

from paxlike.config.knobs import Knobs
from paxlike.errors import UserError
from paxlike.knob_groups.run import RunKnobs
from paxlike.telemetry.trackers import registry
from paxlike.telemetry.trackers.tracker import Record, Tracker, newest

COMMON = {"step": 6, "updates": 7, "time": 5.0}


def test_a_record_is_flattened_to_scalars_and_texts():
  layers = {"gradient_norm": {"mlp": [0.5, None, 2], "embedding": [float("inf")]}}
  record = Record.of({"kind": "layers", **COMMON, "layers": layers, "note": "text", "none": None})
  assert (record.part, record.step, record.updates, record.time) == ("layers", 6, 7, 5.0)
  assert record.named() == {
    "layers/gradient_norm/mlp/0": 0.5,
    "layers/gradient_norm/mlp/2": 2,
    "layers/gradient_norm/embedding/0": float("inf"),
    "layers/updates": 7,
  }
  assert record.texts == {"note": "text"}


@pytest.mark.parametrize(
  ("given", "part"),
  [({"kind": "train"}, "train"), ({"kind": "eval", "set": "a"}, "eval_a"), ({}, "train")],
)
def test_the_part_of_a_record_comes_back_from_its_metrics(given, part):
  record = Record.of({**given, **COMMON, "loss": 1.0})
  assert record.named() == {f"{part}/loss": 1.0, f"{part}/updates": 7}
  assert newest(record.named()) == {part: 7}


def test_a_tracker_from_outside_is_a_choice():
  with pytest.raises(UserError, match=r"is already registered: .*Other needs another name"):

    @registry.register_tracker("wandb")
    class Other(Tracker):
      pass

  class Own(Tracker):
    pass

  with pytest.raises(UserError, match=r"'own_of_test'\. Known: tensorboard, wandb"):
    registry.find(["own_of_test"])
  try:
    assert registry.register_tracker("own_of_test")(Own) is Own
    assert registry.find(["own_of_test", "own_of_test"]) == {"own_of_test": Own}
    assert knobs(TRACKERS="own_of_test,wandb").TRACKERS == ("own_of_test", "wandb")
  finally:
    del registry.TRACKERS["own_of_test"]


def knobs(**texts: str) -> Knobs:
  made = RunKnobs()
  for name, text in texts.items():
    made.set(name, text, source="command line")
  return made


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("wandbb", r"tensorboard, wandb, mlflow, trackio, got 'wandbb'\. Did you mean wandb\?"),
    ("[tensorboard,mflow]", r"Did you mean mlflow\?"),
  ],
)
def test_a_wrong_name_is_refused_with_the_nearest(text, says):
  with pytest.raises(UserError, match=f"TRACKERS.*{says}"):
    knobs(TRACKERS=text)
  with pytest.raises(UserError, match=r"there is no tracker 'wandbb'\. Did you mean wandb\?"):
    registry.check(["wandbb"])


def test_no_tracker_is_a_choice_too():
  assert knobs(TRACKERS="[]").TRACKERS == ()


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
  class Missing(Tracker):
    library = "no_such_library"

  monkeypatch.setitem(registry.TRACKERS, "missing", Missing)
  says = r"missing: no_such_library is missing: pip install 'paxlike\[no_such_library\]'"
  with pytest.raises(UserError, match=says):
    registry.check(["tensorboard", "missing"])
