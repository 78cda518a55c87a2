# SPDX-License-Identifier: Apache-2.0
"""The modules of the user that a run needs are allowed by one call, which the error names."""

import json
import re
import sys

import pytest

import paxlike
from paxlike import registry

pytestmark = pytest.mark.slow

PARTS = """
from paxlike import layers

def my_init(*args, **kwargs):
  return layers.gaussian(*args, **kwargs)
"""
MODULE = """
import fiddle as fdl
from api.conftest import TinyText
import api_parts

class Mine(TinyText):
  def init(self):
    return fdl.Partial(api_parts.my_init, std=0.1)
"""


@pytest.fixture
def away(tmp_path, monkeypatch):
  """A folder with modules of the user; afterwards they are forgotten."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "api_mine.py").write_text(MODULE)
  (tmp_path / "api_parts.py").write_text(PARTS)
  yield
  forget()


def forget():
  for name in ("api_mine", "api_parts"):
    sys.modules.pop(name, None)


def test_one_call_allows_all_that_a_run_needs(away, text, tmp_path):
  import api_mine  # pyright: ignore[reportMissingImports]

  run = paxlike.train(api_mine.Mine, "run", DATA_PATH=str(text), MAX_STEPS=1)
  with pytest.raises(paxlike.UserError, match=r"api_parts\.my_init, which is neither"):
    paxlike.load("run")
  trained = run.load()
  trained.export("theirs")
  forget()
  with pytest.raises(paxlike.UserError) as error:
    paxlike.load("run")
  (call,) = re.findall(r"paxlike\.load\(.*\)", str(error.value))
  assert call == 'paxlike.load("run", allow_modules=["api_parts", "api_mine"])'
  model = eval(call)
  assert model.generate("3 b", max_new_tokens=2) == trained.generate("3 b", max_new_tokens=2)
  assert model.logits([[1, 2]]).shape == (1, 2, 257) and model.evaluate()
  model.export("again")
  for name in ("config.json", "model.safetensors"):
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_a_class_of_this_process_is_exported_without_permission(tiny, text, tmp_path):
  class Local(tiny):
    NUM_LAYERS = 1

  run = paxlike.train(Local, tmp_path / "run", DATA_PATH=str(text), MAX_STEPS=1)
  run.load().export(tmp_path / "theirs")
  model = paxlike.load(tmp_path / "run")
  model.export(tmp_path / "again")
  assert (tmp_path / "again" / "config.json").exists()
  path = tmp_path / "run" / "experiment.json"
  path.write_text(path.read_text().replace("Local", "Gone"))
  with pytest.raises(paxlike.UserError) as error:
    model.export(tmp_path / "more")
  assert f'paxlike.load("{run.folder}", allow_modules=[' in str(error.value)


def test_a_class_that_is_defined_again_is_the_new_one(tmp_path, monkeypatch):
  path = tmp_path / "experiment.json"
  first = type("Again", (paxlike.Experiment,), {"__module__": "__main__"})
  second = type("Again", (paxlike.Experiment,), {"__module__": "__main__"})
  for cls in (first, second):
    monkeypatch.setattr(sys.modules["__main__"], "Again", cls, raising=False)
    path.write_text(registry.dump(cls()))
    assert type(registry.load(path)) is cls
  path.write_text(json.dumps({"experiment": "__main__.Gone", "knobs": {}}))
  with pytest.raises(paxlike.UserError, match="notebook defined it: run its definition here"):
    registry.load(path)
