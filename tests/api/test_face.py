# SPDX-License-Identifier: Apache-2.0
"""`import paxlike` is light, and offers what it says."""

import os
import pathlib
import subprocess
import sys

import pytest
from helpers.sources import REPOSITORY

import paxlike


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
  """Runs a program."""
  own = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  command = [sys.executable, *flags, "-c", code]
  return subprocess.run(command, env=own, capture_output=True, text=True, check=True)


def test_importing_it_imports_nothing_heavy():
  done = python("import paxlike, sys; print({n.partition('.')[0] for n in sys.modules})")
  assert not {"jax", "numpy", "fiddle", "flax", "etils"} & eval(done.stdout)


def test_importing_it_takes_no_time():
  done = python("import paxlike", "-X", "importtime")
  (line,) = [line for line in done.stderr.splitlines() if line.endswith("| paxlike")]
  assert int(line.split("|")[1]) < 200_000  # Microseconds.


def test_it_offers_what_it_says():
  assert set(paxlike.__all__) == set(paxlike._PLACES)
  assert set(paxlike.__all__) < set(dir(paxlike))
  for name in paxlike.__all__:
    assert getattr(paxlike, name) is not None, name
  assert paxlike.datasets.LocalText and paxlike.layers.Linear
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    _ = paxlike.trian  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_type_checkers_see_its_types(tmp_path):
  assert (REPOSITORY / "paxlike" / "py.typed").is_file()
  file = tmp_path / "mine.py"
  file.write_text(
    "import paxlike\n"
    "class Mine(paxlike.datasets.LocalText, paxlike.Experiment): ...\n"
    "reveal_type(paxlike.train(Mine, 'runs/mine', MAX_STEPS=2).load())\n"
    "paxlike.train(3, 'x')\n"
  )
  pyright = pathlib.Path(sys.executable).with_name("pyright")
  own = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  command = [str(pyright), "--pythonpath", sys.executable, str(file)]
  done = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, check=False)
  assert 'is "Model"' in done.stdout
  assert '"Literal[3]" is not assignable to' in done.stdout
  assert "1 error," in done.stdout
