# SPDX-License-Identifier: Apache-2.0
"""The wheel holds the whole package, and runs where there is no repository."""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
from helpers.sources import REPOSITORY

TINY = [
  "--fdl_config=Synthetic126M",
  "--fdl.NUM_LAYERS=1",
  "--fdl.MODEL_DIMS=32",
  "--fdl.HIDDEN_DIMS=64",
  "--fdl.NUM_HEADS=2",
  "--fdl.DIMS_PER_HEAD=16",
  "--fdl.VOCAB_SIZE=128",
  "--fdl.MAX_SEQ_LEN=16",
  "--fdl.PERCORE_BATCH_SIZE=2",
  "--fdl.FPROP_DTYPE=float32",
  "--fdl.MAX_STEPS=2",
  "--fdl.SUMMARY_INTERVAL_STEPS=1",
]

pytestmark = pytest.mark.slow


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
  """Runs a program without the repository on its path. Returns its output."""
  environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
  done = subprocess.run(
    [str(part) for part in command],
    cwd=cwd,
    env=environment,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout
  return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  """The wheel, built from a copy so that no build folder of the repository takes part in it."""
  folder = tmp_path_factory.mktemp("wheel")
  files = ["pyproject.toml", "README.md", "LICENSE", *package_files()]
  for name in files:
    target = folder / "source" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes((REPOSITORY / name).read_bytes())
  pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
  run(*pip, "--wheel-dir", folder, folder / "source", cwd=folder)
  (path,) = folder.glob("paxlike-*.whl")
  return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
  """The bin folder of an otherwise empty venv with the wheel in it.

  To spare the download of its dependencies, a .pth file shows it the third-party packages of this
  environment. .pth files in there are not followed, so an editable install of paxlike is not seen.
  """
  folder = tmp_path_factory.mktemp("venv")
  venv.create(folder, with_pip=True, symlinks=True)
  (bin_folder,) = folder.glob("bin")
  (site,) = folder.glob("lib/python*/site-packages")
  run(bin_folder / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
  (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
  return bin_folder


def package_files() -> list[str]:
  """What the wheel is to hold, relative to the repository."""
  return [
    path.relative_to(REPOSITORY).as_posix()
    for path in (REPOSITORY / "paxlike").rglob("*")
    if path.is_file() and path.suffix in (".css", ".js", ".py", ".sh", ".typed")
  ]


def test_wheel_holds_the_package_and_nothing_else(wheel):
  with zipfile.ZipFile(wheel) as archive:
    names = {name for name in archive.namelist() if ".dist-info/" not in name}
    (entry_points,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
    commands = archive.read(entry_points).decode()
  assert names == set(package_files())
  assert "paxlike = paxlike.main:run" in commands
  assert "paxlike-plot = paxlike.cli.plot:main" in commands


def test_installed_wheel_is_the_one_that_runs(installed, tmp_path):
  code = "import paxlike, sys; print(paxlike.__file__); print(paxlike.__version__)"
  path, version = run(installed / "python", "-c", code, cwd=tmp_path).split()
  assert pathlib.Path(path).is_relative_to(installed.parent)
  assert version


def test_command_helps_and_trains_from_another_folder(installed, tmp_path):
  assert "--fdl_config" in run(installed / "paxlike", "--help", cwd=tmp_path)
  run(installed / "paxlike", *TINY, "--job_log_dir=run", cwd=tmp_path)
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  train = [line for line in map(json.loads, lines) if line["kind"] == "train"]
  assert len(train) == 2 and all(4 < line["loss"] < 6 for line in train)
  assert (tmp_path / "run" / "checkpoints" / "checkpoint_00000002").is_dir()
