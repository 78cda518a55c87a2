# SPDX-License-Identifier: Apache-2.0
"""Recipes that are named for their hardware compile for it, each as a small model of its kind."""

import importlib.util
import json
import re

import pytest
from helpers.program import run
from helpers.sources import REPOSITORY

from paxlike import registry, run_mode
from paxlike.devices import topology
from paxlike.training import preflight

_PATH = REPOSITORY / "benchmarks" / "recipes.py"


def recipes() -> list[tuple[str, str, int]]:
  """Returns those of the benchmark, which compiles them whole."""
  spec = importlib.util.spec_from_file_location("recipes", _PATH)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return list(module.RECIPES)


def test_every_recipe_is_in_the_table():
  names = [cls.__name__ for cls in registry.registered().values()]
  named = {name for name in names if re.search(r"(V5e|V5p)\d+$|\dGpus$", name)}
  assert named - {"Synthetic126M64Gpus"} == {name for name, _, _ in recipes()}


@pytest.mark.parametrize(("name", "devices", "slices"), recipes())
def test_every_recipe_has_a_mesh_of_its_devices_that_divides_its_batch(name, devices, slices):
  experiment = registry.find(name)()
  if slices > 1:
    experiment.set("DCN_MESH_SHAPE", f"[{slices},1,1]", source="test")
  with topology.target(devices, slices=slices):
    trainer = run_mode.build_trainer(experiment.trainer())
    preflight.check_setup(trainer, training=True)
    assert trainer.devices.size == slices * size_of(devices)


def size_of(devices: str) -> int:
  kind, count = devices.split("-")
  return int(count) // (2 if kind == "v5p" else 1)  # Those are named by their cores.


def one_of_a_kind() -> list[tuple[str, str]]:
  """Returns one recipe (name, topology) for each family and chip, but of 512 devices.

  Those take half a minute to compile; benchmarks/recipes.py does.
  """
  kinds = {}
  for name, devices, _ in recipes():
    if size_of(devices) < 512:
      kinds.setdefault((re.split(r"\d", name)[0], devices.split("-")[0]), (name, devices))
  return sorted(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), one_of_a_kind())
def test_a_small_model_of_its_kind_compiles(name, devices, capsys):
  flags = (f"--fdl_config={name}", f"--topology={devices}", "--fiddler=shrink", "--json")
  assert run(*flags, "--mode=compile") == 0
  facts = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert facts["fits"]
  assert facts["num_devices"] == size_of(devices)
