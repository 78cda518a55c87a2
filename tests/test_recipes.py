# SPDX-License-Identifier: Apache-2.0
"""Recipes that are named for their hardware compile for it, each as a small model of its kind."""

import importlib.util
import json
import re

import pytest
from helpers.program import run
from helpers.sources import REPOSITORY

from paxlike import registry

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


def one_of_a_kind() -> list[tuple[str, str]]:
  """Returns (name, topology) of a recipe for each family and chip: shrunk, others are alike."""
  kinds = {}
  for name, topology, _ in recipes():
    kinds.setdefault((re.split(r"\d", name)[0], topology.split("-")[0]), (name, topology))
  return sorted(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "topology"), one_of_a_kind())
def test_a_small_model_of_its_kind_compiles(name, topology, capsys):
  flags = (f"--fdl_config={name}", f"--topology={topology}", "--fiddler=shrink", "--json")
  assert run(*flags, "--mode=compile") == 0
  facts = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert facts["fits"]
  size = int(topology.split("-")[1]) // (2 if topology.startswith("v5p") else 1)
  assert facts["num_devices"] == size
