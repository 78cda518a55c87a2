# SPDX-License-Identifier: Apache-2.0
"""Registry of experiments: found by short name, by a unique dotted suffix, or by full path."""

import importlib
import json
import os
import pathlib
import pkgutil
from collections.abc import Iterable
from typing import TypeVar

from etils import epath

from paxlike import file_io, run_folder
from paxlike.config import allowed_symbols, local_experiments
from paxlike.config.knobs import spell
from paxlike.errors import UserError, did_you_mean
from paxlike.experiment import Experiment

_PACKAGES = ("paxlike.experiments", "paxlike.scripts_gpu")
PACKAGE = pathlib.Path(__file__).parent
_REGISTRY: dict[str, type[Experiment]] = {}
_Class = TypeVar("_Class", bound=type[Experiment])


def register(cls: _Class) -> _Class:
  """Decorator that registers a complete experiment, so that its name alone finds it."""
  _REGISTRY[f"{cls.__module__}.{cls.__qualname__}"] = cls
  return cls


def registered() -> dict[str, type[Experiment]]:
  """Returns full path -> class of all registered experiments, in the order of their files."""
  for package in _PACKAGES:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
      importlib.import_module(f"{package}.{module.name}")
  return dict(_REGISTRY)


def find(name: str, *, flag: str = "fdl_config") -> type[Experiment]:
  """Returns the experiment with a name, the value of `flag`.

  A full path also finds classes outside of the package; the working directory is importable.

  Raises:
    UserError: The name is unknown or ambiguous, or its module cannot be imported.
  """
  found = _registered(name, flag)
  if found is not None:
    return found
  if "." in name:
    if not all(part.isidentifier() for part in name.split(".")):
      raise UserError(f"--{flag}={name}: expected NAME or MODULE.NAME of an experiment.")
    return _import(name, f"--{flag}={name}")
  local = [one.name for one in local_experiments.find()]
  near = [one for one in local if name in one.split(".")]
  hint = did_you_mean(name, [path.rpartition(".")[2] for path in registered()])
  if near:
    hint = f" Did you mean {near[0]}?"
  raise UserError(f"--{flag}: no experiment {name}.{hint or ' --list shows all of them.'}")


def _registered(name: str, flag: str) -> type[Experiment] | None:
  """Returns the registered experiment with a name; None if there is none."""
  known = registered()
  matches = [path for path in known if path == name or path.endswith(f".{name}")]
  if name in known:
    return known[name]
  if len(matches) == 1:
    return known[matches[0]]
  if matches:
    raise UserError(f"--{flag}={name} is ambiguous: {', '.join(sorted(matches))}.")
  return None


def with_data(family: type[Experiment], mixin: str) -> type[Experiment]:
  """Returns the experiment of a family with a data mixin of `experiments/datasets.py`, by name.

  Raises:
    UserError: There is no such mixin.
  """
  datasets = importlib.import_module("paxlike.experiments.datasets")
  if mixin not in datasets.__all__:
    raise UserError(f"no data mixin {mixin}.{did_you_mean(mixin, datasets.__all__)}")
  bases = (getattr(datasets, mixin), family)
  return type(family.__name__, bases, {"_data": mixin, "__module__": family.__module__})


def dump(experiment: Experiment) -> str:
  """Returns an experiment's class and the knobs that were set, as JSON for `load`."""
  cls = type(experiment)
  data = vars(cls).get("_data")
  if data is not None:
    cls = cls.__bases__[1]
  knobs = {name: spell(setting.value) for name, setting in experiment.settings().items()}
  saved = {"experiment": f"{cls.__module__}.{cls.__qualname__}", "knobs": knobs}
  if data is not None:
    saved["data"] = data
  return json.dumps(saved, indent=2) + "\n"


def load(path: epath.PathLike, *, allow_modules: Iterable[str] = ()) -> Experiment:
  """Returns the experiment saved in a file.

  Args:
    path: The file.
    allow_modules: Modules besides paxlike's that may define the experiment; no other is imported.

  Raises:
    UserError: The file is missing or damaged, or its experiment no longer exists or is of a module
      that is not allowed.
  """
  path = epath.Path(path)
  try:
    text = file_io.read_bytes(path).decode()
    saved = json.loads(run_folder.with_own_paths(text, path.parent))
    name, knobs = str(saved["experiment"]), dict(saved["knobs"])
    data = str(saved.get("data", ""))
    if not all(isinstance(text, str) for text in knobs.values()):
      raise ValueError("the values of knobs are not strings")
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
  except file_io.MALFORMED as error:
    raise UserError(f"{path} is damaged: {error}.") from None
  module = name.rpartition(".")[0]
  found = _registered(name, "fdl_config")
  if found is None and not allowed_symbols.within(
    module, [*_PACKAGES, *filter(None, allow_modules)]
  ):
    advice = allowed_symbols.advice([module or name], given=allow_modules, folder=path.parent)
    raise UserError(f"{path} is of the experiment {name}, which is not part of paxlike. {advice}")
  try:
    with allowed_symbols.copies(path.parent):
      family = found or _import(name, f"the experiment {name}")
    experiment = (with_data(family, data) if data else family)()
    for knob, text in knobs.items():
      experiment.set(knob, text, source=path.name)
  except UserError as error:
    raise UserError(f"{path}: {error}") from error
  return experiment


def _import(path: str, given: str) -> type[Experiment]:
  module_name, _, class_name = path.rpartition(".")
  try:
    module = allowed_symbols.import_module(module_name)
  except ModuleNotFoundError as error:
    if error.name and (module_name + ".").startswith(error.name + "."):
      raise UserError(
        f"{given}: no module {error.name}, neither in {os.getcwd()} nor installed."
      ) from None
    raise UserError(f"{given}: importing {module_name} failed: {error}.") from error
  found = getattr(module, class_name, None)
  if found is None:
    classes = [
      n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Experiment)
    ]
    hint = (
      did_you_mean(class_name, classes) or f" It has: {', '.join(classes) or 'no experiments'}."
    )
    raise UserError(f"{given}: {module_name} has no {class_name}.{hint}")
  if not (isinstance(found, type) and issubclass(found, Experiment)):
    raise UserError(f"{given} is not a subclass of paxlike.experiment.Experiment.")
  return found
