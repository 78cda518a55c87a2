# SPDX-License-Identifier: Apache-2.0
"""The source files of the repository."""

import pathlib

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "paxlike"
SOURCES = sorted(
  path
  for folder in ("paxlike", "benchmarks", "tests")
  for path in (REPOSITORY / folder).rglob("*.py")
)
MODULES = [path for path in SOURCES if path.is_relative_to(PACKAGE)]
