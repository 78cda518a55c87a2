# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that MaxText and Pax wrote (tests/golden/{maxtext,pax}/make.py)."""

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.archives import extract as extract_archive
from helpers.hf_models import imported, logits
from paxlike.convert.main import run

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def archives(program: str) -> list[str]:
  """The names of the checkpoints of a program."""
  return sorted(path.name.partition(".")[0] for path in (GOLDEN / program).glob("*.tar.xz"))


def extract(program: str, name: str, to: pathlib.Path) -> pathlib.Path:
  """Returns the folder of a run, which is made in `to`."""
  extract_archive(GOLDEN / program / f"{name}.tar.xz", to)
  return to / name


def rewrite(folder: pathlib.Path, arrays: dict[str, np.ndarray], *, driver: str = "zarr"):
  """Writes arrays as Orbax did before OCDBT: in a folder each."""
  import tensorstore as ts

  shutil.rmtree(folder)
  for name, value in arrays.items():
    store = {"driver": "file", "path": f"{folder / name}/"}
    spec = {"driver": driver, "kvstore": store}
    array = ts.open(spec, create=True, dtype=value.dtype, shape=value.shape).result()
    array.write(value).result()


def flags(experiment: str, sizes: Mapping[str, Any]) -> list[str]:
  """The flags of an experiment of the sizes of a checkpoint."""
  return [f"--fdl_config={experiment}", *(f"--fdl.{knob}={v}" for knob, v in sizes.items())]


def assert_same_logits(
  program: str, folder: pathlib.Path, to: pathlib.Path, *more: str, rtol: float = 1e-4
):
  """Converts a run, and compares logits with those that the program computed."""
  paths = f"--path={folder}", f"--to={to}"
  assert run([f"--from={program}", *paths, *more]) == 0
  saved = np.load(folder / "logits.npz")
  expected = saved["logits"]
  got = logits(*imported(to), saved["tokens"])
  assert np.abs(expected).max() > 0.1
  np.testing.assert_allclose(got, expected, atol=rtol * np.abs(expected).max(), rtol=0)
