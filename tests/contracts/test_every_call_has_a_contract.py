# SPDX-License-Identifier: Apache-2.0
"""No call of what only hardware runs, or of what JAX keeps private, is without a contract."""

import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "paxlike"
CALLS = re.compile(
  r"^\s*(?:from|import) (?:jax\._src|jax\.experimental(?:\.pallas| import pallas)|orbax)\b"
  r"|^\s*from jax import .*\bexperimental\b"
  r"|\bjax\.(?:distributed\.\w+\(|memory\.\w)"
  r"|\bmemory_kind=|with_memory_kind\(|\"pinned_host\""
  r"|import_module\(\"(?:tokamax|transformer_engine)",
  re.MULTILINE,
)


def callers() -> set[str]:
  files = PACKAGE.rglob("*.py")
  return {str(p.relative_to(PACKAGE)) for p in files if CALLS.search(p.read_text())}


def rows() -> list[list[str]]:
  lines = (HERE / "README.md").read_text().splitlines()
  return [line.strip("|").split("|") for line in lines if line.startswith("| `")]


def test_each_caller_stands_in_the_table():
  named = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])}
  assert callers() == named


def test_each_contract_of_the_table_is_a_test():
  tests = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[-1])}
  there = {path.name for path in HERE.glob("test_*.py")} - {pathlib.Path(__file__).name}
  assert tests == there


def test_a_new_call_is_found():
  for line in (
    "from jax._src.cudnn import x",
    "  from jax.experimental import pallas as pl",
    'm = importlib.import_module("tokamax")',
    'x.with_memory_kind("pinned_host")',
    "    import orbax.checkpoint as ocp",
    "  jax.distributed.initialize(address, 2, index)",
    "jax.device_put(x, jax.memory.Space.Device)",
    'SingleDeviceSharding(device, memory_kind="unpinned_host")',
    "from jax import lax, experimental",
  ):
    assert CALLS.search(line), line
  for line in ("from jax.experimental import multihost_utils", "Initialise `jax.distributed`."):
    assert not CALLS.search(line), line
