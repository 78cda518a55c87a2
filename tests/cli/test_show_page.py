# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from paxlike import registry
from paxlike.cli import show_page


def shown(name, **knobs):
  experiment = registry.find(name)(**knobs)
  return show_page.everything(experiment, experiment.trainer())


def test_memory_of_a_mesh_that_is_not_here():
  text = shown("Synthetic175B256Gpus")
  assert re.search(r"mesh +256 devices: fsdp 256 \(here: 8\)", text)
  assert "1,536 sequences = 3,145,728 tokens" in text
  # 4 bytes a parameter and 8 of Adam, over 256 devices, but for what 256 does not divide.
  weights = r"memory of trained parameters +2\.7\d+ GB per device \(698\.4 GB in total\)"
  assert re.search(weights, text)
  assert re.search(r"memory of optimizer state +5\.5\d+ GB per device \(1\.397 TB in total\)", text)


def test_dims_that_an_axis_does_not_divide_are_told():
  text = shown("Synthetic175B", ICI_MESH_SHAPE=(1, 4, 2))
  assert "vocab 50,257 is not divisible by tensor 2" in text
  assert "not divided" not in shown("Synthetic126M", ICI_MESH_SHAPE=(1, 4, 2))


@pytest.mark.slow
def test_every_experiment_is_listed():
  text = show_page.experiments()
  assert re.search(r"^Synthetic126M +125,262,336 ", text, re.MULTILINE)
  for path in registry.registered():
    assert re.search(rf"^{path.rpartition('.')[2]} +[\d,]+ ", text, re.MULTILINE), path
