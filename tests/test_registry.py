# SPDX-License-Identifier: Apache-2.0
import pytest

from paxlike import registry
from paxlike.errors import UserError
from paxlike.experiments import gpt


def test_a_name_a_suffix_and_a_path_find_the_same_experiment():
  for name in ("Synthetic126M", "gpt.Synthetic126M", "paxlike.experiments.gpt.Synthetic126M"):
    assert registry.find(name) is gpt.Synthetic126M
  assert registry.find("paxlike.scripts_gpu.configs.Synthetic126M") is gpt.Synthetic126M


def test_every_registered_short_name_is_unique():
  names = [path.rpartition(".")[2] for path in registry.registered()]
  assert len(set(names)) == len(names)
  for name in names:
    assert registry.find(name).__name__ == name


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("Synthetic126", "Did you mean Synthetic126M?"),
    ("paxlike.experiments.gpt.Synthetic127M", "Did you mean Synthetic126M?"),
    ("no_such_module.Gpt", "no module no_such_module"),
    ("os.getcwd", "no subclass of paxlike.experiment.Experiment"),
  ],
)
def test_mistakes_are_named(name, says):
  with pytest.raises(UserError) as error:
    registry.find(name)
  assert says in str(error.value)


def test_a_module_that_fails_says_why(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "broken_experiments.py").write_text("import a_package_that_is_missing\n")
  with pytest.raises(UserError, match=r"importing broken_experiments failed: .*is_missing"):
    registry.find("broken_experiments.Gpt")
