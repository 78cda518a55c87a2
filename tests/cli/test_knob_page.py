# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from paxlike import registry
from paxlike.cli import knob_page
from paxlike.experiment import Experiment
from paxlike.experiments import datasets
from paxlike.experiments.gpt import Gpt126M
from paxlike.experiments.moe import Moe

GROUPS = ("Model", "Precision", "Parallelism", "Batch", "Optimizer", "Schedule")
GROUPS += ("Parametrization", "Run", "Profiling", "Checkpoint", "Fine-tuning")


class Mine(Moe, datasets.Synthetic, Gpt126M):
  NUM_LAYERS = 3
  NUM_EXPERTS = 4
  DEPTH: int = 1  #: Of mine.


class More(Mine):
  NUM_LAYERS: int = 2
  NUM_EXPERTS = 4
  RANDOM_SEED = 7


def headings(text: str) -> list[str]:
  return re.findall(r"^([\w-]+)(?::.*)?$", text, re.MULTILINE)


def changed(experiment: Experiment) -> dict[str, list[str]]:
  """Knob -> value, default and the start of what set it."""
  text = knob_page.table(experiment, changed=True)
  rows = re.findall(r"^  ([A-Z_]+) +(.+)$", text, re.MULTILINE)
  return {name: rest.split()[:3] for name, rest in rows}


@pytest.mark.parametrize("cls", registry.registered().values(), ids=lambda c: c.__name__)
def test_each_experiment_has_the_groups_in_their_order(cls):
  text = knob_page.help_text(cls)
  assert tuple(headings(text.partition("\n\nModel: ")[2]))[: len(GROUPS) - 1] == GROUPS[1:]
  shown = headings(knob_page.table(cls()))
  assert tuple(shown[: len(GROUPS)]) == GROUPS
  assert len(shown) == len({*shown}) and not [name for name in shown if name.endswith("Knobs")]
  assert text.count("\n  --fdl.") == len(cls.knobs())


def test_families_and_mixins_are_groups_of_their_own():
  assert headings(knob_page.table(Mine()))[len(GROUPS) :] == ["Moe", "Synthetic", "Mine"]
  # A knob that is declared again stays in its group.
  assert headings(knob_page.table(More()))[len(GROUPS) :] == ["Moe", "Synthetic", "Mine"]


def test_choices_are_written_out():
  for text in (knob_page.help_text(Mine), knob_page.table(Mine())):
    assert "linear_rampup_cosine_decay | linear_rampup_exponential_decay | constant" in text
    assert "fp8 | fp8_delayed | mxfp8 | int8 | qat_" in text
    assert "Literal" not in text


def test_help_has_default_description_and_type_of_each_knob():
  text = knob_page.help_text(Mine)
  lines = ("  --fdl.NUM_LAYERS=3", "Number of transformer blocks.", "1 <= int <= 1024; set in Mine")
  assert "\n      ".join(lines) in text
  assert "\n  --fdl.DEPTH=1\n      Of mine.\n      int" in text
  assert "--fdl.MAX_STEPS=required" in knob_page.help_text(Experiment)


def test_a_knob_has_changed_if_it_differs_from_the_nearest_base_that_is_not_registered():
  assert changed(Mine()) == {
    "NUM_LAYERS": ["3", "12", "subclass"],
    "NUM_EXPERTS": ["4", "8", "subclass"],
  }
  assert changed(Mine(NUM_LAYERS=12, DEPTH=5)) == {
    "NUM_EXPERTS": ["4", "8", "subclass"],
    "DEPTH": ["5", "1", "constructor"],
  }
  assert changed(More()) == {
    "NUM_LAYERS": ["2", "3", "class"],
    "RANDOM_SEED": ["7", "1234", "subclass"],
  }
  assert changed(registry.find("Synthetic126M")()) == {"MAX_STEPS": ["100", "600000", "subclass"]}
  assert changed(registry.find("SyntheticLLaMA7B")()) == {}
  # Its base Llama3_8B is registered, so the defaults are those of Llama.
  found = changed(registry.find("Llama3_70B")())
  assert found["NUM_LAYERS"] == ["80", "(unset)", "subclass"]
  assert found["NUM_KV_HEADS"] == ["8", "None", "subclass"]
