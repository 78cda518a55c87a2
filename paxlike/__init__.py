# SPDX-License-Identifier: Apache-2.0
"""Trains language models from one experiment class."""

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

# With gcsfs, paths on gs:// need no TensorFlow, which epath would import for ten seconds in each
# process. epath reads this variable once, so it must be set before the first path.
if importlib.util.find_spec("gcsfs") is not None:
  os.environ.setdefault("EPATH_USE_TF", "0")
# By default gcsfs caches folder listings forever and would not see what other processes write.
os.environ.setdefault("FSSPEC_GCS", '{"use_listings_cache": false}')
if "fsspec.config" in sys.modules:  # It has already read the environment.
  sys.modules["fsspec.config"].conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)

__version__ = "0.2.0"

if TYPE_CHECKING:
  from paxlike import errors, layers
  from paxlike.api.model import Model, load
  from paxlike.api.run import Run, train
  from paxlike.api.session import Session
  from paxlike.errors import RunError, UserError
  from paxlike.experiment import Experiment
  from paxlike.experiments import datasets
  from paxlike.registry import register
  from paxlike.telemetry.callbacks import Callback

__all__ = [
  "Callback",
  "Experiment",
  "Model",
  "Run",
  "RunError",
  "Session",
  "UserError",
  "datasets",
  "errors",
  "layers",
  "load",
  "register",
  "train",
]
# Exported name -> the module that defines it; for a module, its own full name. Imported on first
# use, because importing JAX takes a second.
_PLACES = {
  "Callback": "paxlike.telemetry.callbacks",
  "Experiment": "paxlike.experiment",
  "Model": "paxlike.api.model",
  "Run": "paxlike.api.run",
  "RunError": "paxlike.errors",
  "Session": "paxlike.api.session",
  "UserError": "paxlike.errors",
  "datasets": "paxlike.experiments.datasets",
  "errors": "paxlike.errors",
  "layers": "paxlike.layers",
  "load": "paxlike.api.model",
  "register": "paxlike.registry",
  "train": "paxlike.api.run",
}


def __getattr__(name: str) -> Any:
  if name not in _PLACES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = importlib.import_module(_PLACES[name])
  globals()[name] = value = getattr(module, name, module)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
