# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile, by a linter; no test builds the image."""

import re
import subprocess
import tomllib

import pytest
from helpers import launch_files
from helpers.sources import REPOSITORY

FILE = REPOSITORY / "Dockerfile"


def test_the_linter_has_no_objection():
  hadolint = launch_files.linter("hadolint")
  if not hadolint:
    pytest.skip("hadolint is not installed")
  assert subprocess.run([hadolint, FILE], check=False).returncode == 0


def test_what_it_names_exists():
  """Extras of the package, here and on the page, and files that .dockerignore lets through."""
  extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
  page = (REPOSITORY / "docs" / "guide" / "launching.md").read_text()
  named = re.findall(r"EXTRAS=([a-z0-9,]+)", FILE.read_text() + page)
  assert {one for names in named for one in names.split(",")} == {"cuda12", "cuda13", "tpu", "gcs"}
  assert extras["optional-dependencies"].keys() >= {"cuda12", "cuda13", "tpu", "gcs"}
  copied = [word for line in re.findall("^COPY (.*) [^ ]+$", FILE.read_text(), re.M)
            for word in line.split()]  # fmt: skip
  let_through = (REPOSITORY / ".dockerignore").read_text().split()
  assert {"pyproject.toml", "README.md", "LICENSE", "paxlike"} == set(copied)
  assert all((REPOSITORY / name).exists() and f"!{name}" in let_through for name in copied)
