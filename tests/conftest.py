# SPDX-License-Identifier: Apache-2.0
"""Eight fake CPU devices, a private cache folder, and compiled programs that sessions share."""

import atexit
import contextlib
import gc
import importlib.abc
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import jax
import pytest
from helpers.program_folder import FOLDER, program_folder, remove_old

from paxlike.devices import topology

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_SCRATCH = pathlib.Path(tempfile.mkdtemp(prefix="paxlike-tests-"))

# Before anything asks for a device or a cache folder: backends start once and read these then.
# Programs that tests start get the environment, this process the configuration.
os.environ["PAXLIKE_CACHE"] = str(_SCRATCH / "cache")
os.environ["JAX_PLATFORMS"] = "cpu"
# The threads of XLA: as devices meet in one collective, others of the same step wait in their own.
os.environ["NPROC"] = "64"
# As glibc has it by itself: one heap for all threads makes compilations slower.
os.environ["MALLOC_ARENA_MAX"] = "16"
# Tests compile far more than they compute. A flag that XLA does not know would end the process.
_QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):
  _QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(_QUICK)
# XLA's compilation takes most of the tests' time, so executables are kept between sessions. Names
# of scopes are in their keys, since tests read them; source lines are left out, since they cost a
# tenth of a compilation. Workers and programs that tests start get the environment.
_PROGRAMS = program_folder(otherwise=_SCRATCH / "programs")
os.environ[FOLDER] = str(_PROGRAMS)
for name, value in {
  "jax_compilation_cache_dir": str(_PROGRAMS),
  "jax_compilation_cache_include_metadata_in_key": True,
  "jax_persistent_cache_min_compile_time_secs": 0.03,
  "jax_traceback_in_locations_limit": 0,
}.items():
  os.environ[name.upper()] = str(value)
  jax.config.update(name, value)
# Traces leave many objects alive; to scan them often, or as the process exits, takes long.
gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# With all plugins: a program that compiles for TPUs leaves out those for GPUs, the next may not.
jax.devices()


class _TritonFirst(importlib.abc.MetaPathFinder):
  """Loads torch's Triton before TensorFlow: after it, Triton ends the process."""

  def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
    del path, target
    if fullname == "tensorflow" and "triton" not in sys.modules:
      with contextlib.suppress(ImportError):
        importlib.import_module("triton")


sys.meta_path.insert(0, _TritonFirst())


def pytest_unconfigure(config: pytest.Config):
  if not hasattr(config, "workerinput"):
    remove_old(_PROGRAMS)
  shutil.rmtree(_SCRATCH, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
  """Frees the programs that a module compiled: of all modules, they take several GB."""
  yield
  jax.clear_caches()


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
  """The folder of real texts and models that may lie beside the repository."""
  path = _REPOSITORY.parent / "shared" / "data"
  if not path.is_dir():
    pytest.skip(f"{path} is not there")
  return path


@pytest.fixture
def h200():
  """Programs are made for one H200, which is not there."""
  with topology.target("h200-1"):
    yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A text of 110 training sequences of 16 tokens, and some for validation."""
  path = tmp_path_factory.mktemp("text") / "corpus.txt"
  path.write_text("".join(f"{i} bottles of beer on the wall. " for i in range(60)))
  return path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
  """Prints what each campaign of odd inputs counted."""
  if tried := sys.modules.get("helpers.campaign"):
    for name, counts in tried.COUNTS.items():
      shown = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
      terminalreporter.write_line(f"{name}: {sum(counts.values())} inputs: {shown}")
