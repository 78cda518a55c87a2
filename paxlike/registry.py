# SPDX-License-Identifier: Apache-2.0
"""Registry of experiments: found by short name, by a unique dotted suffix, or by full path."""

import importlib
import json
import os
import pathlib
import pkgutil
import sys
import types
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
# Names of Pax's experiments that differ here.
_PAX_NAMES = {
  "GPT5B": "Pile5B",
  "GPT175B": "Pile175B",
  "C4SpmdGpt3AdamOrgHP": "C4Gpt175B",
}
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
  if found is None and (ours := _of_pax(name)) is not None:
    print(f"paxlike: --{flag}={name} of Pax is {ours} here", file=sys.stderr)
    found = _registered(ours, flag)
  if found is not None:
    return found
  if name.endswith(".py"):
    raise UserError(f"--{flag}={name}: expected NAME or MODULE.NAME.{_in_file(name, flag)}")
  if "." in name:
    if not all(part.isidentifier() for part in name.split(".")):
      raise UserError(f"--{flag}={name}: expected NAME or MODULE.NAME of an experiment.")
    return _import(name, f"--{flag}={name}")
  local = [one.name for one in local_experiments.find()]
  near = [one for one in local if name in one.split(".")]
  hint = did_you_mean(name, [path.rpartition(".")[2] for path in registered()])
  if near:
    hint = f" Did you mean {near[0]}?"
  elif incomplete := _unregistered(name):
    raise UserError(f"--{flag}: {_completions(incomplete, flag)}")
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


def _of_pax(name: str) -> str | None:
  """Returns our name for an experiment of Pax; None if there is none."""
  module, _, short = name.rpartition(".")
  if module and not module.startswith(("paxml.", "tasks.lm.")):
    return None
  ours = _PAX_NAMES.get(short, short if module else None)
  return ours if any(path.endswith(f".{ours}") for path in registered()) else None


def _unregistered(name: str) -> type[Experiment] | None:
  """Returns the family, model or data mixin of the package with a name; None if there is none."""
  names = [one for one in sys.modules if allowed_symbols.within(one, _PACKAGES)]
  found = (getattr(sys.modules[one], name, None) for one in names)
  return next((cls for cls in found if isinstance(cls, type) and issubclass(cls, Experiment)), None)


def _completions(cls: type[Experiment], flag: str) -> str:
  """Returns a sentence that names the registered experiments nearest to an incomplete one."""
  datasets = importlib.import_module("paxlike.experiments.datasets")
  is_model = cls.train_data is Experiment.train_data
  has, adds = ("a model without data", "a data mixin") if is_model else ("data alone", "a model")
  derived = [one for one in registered().values() if issubclass(one, cls)]
  direct = [one for one in derived if cls in one.__bases__] or derived
  direct.sort(key=lambda one: not issubclass(one, datasets.Synthetic))  # These need no files.
  names = " or ".join(f"--{flag}={one.__name__}" for one in direct[:3])
  use = f"{names}, or " if names else ""
  return f"{cls.__name__} is {has}: use {use}a class of yours that adds {adds} (docs/adding.md)."


def _in_file(name: str, flag: str) -> str:
  """Returns a hint that names the experiments in a file; imports nothing."""
  module = ".".join(pathlib.Path(name).with_suffix("").parts)
  found = [one.name for one in local_experiments.find() if one.name.startswith(f"{module}.")]
  if not found:
    return f" {name} has no experiment."
  return f" Did you mean {' or '.join(f'--{flag}={path}' for path in found)}?"


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
  name, knobs, data = read_saved(path)
  found = _known(name)
  module = name.rpartition(".")[0]
  if found is None and not allowed_symbols.within(
    module, [*_PACKAGES, *filter(None, allow_modules)]
  ):
    what = f"{path} is of the experiment {name}, which is not part of paxlike."
    if module == "__main__":
      raise UserError(f"{what} A script or notebook defined it: run its definition here first.")
    advice = allowed_symbols.advice([module or name], given=allow_modules, folder=path.parent)
    raise UserError(f"{what} {advice}")
  try:
    with allowed_symbols.copies(path.parent):
      family = found or _import(name, f"the experiment {name}")
      experiment = (with_data(family, data) if data else family)()
      for knob, text in knobs.items():
        try:
          experiment.set(knob, text, source=path.name)
        except UserError:  # It may name what an allowed module registers, such as a schedule.
          import_modules(allow_modules)
          experiment.set(knob, text, source=path.name)
  except UserError as error:
    raise UserError(f"{path}: {error}") from error
  return experiment


def foreign_module(path: epath.PathLike) -> str | None:
  """Returns the module outside of paxlike that `load` of this file would import, if allowed.

  None: the experiment is paxlike's, its class is already defined, or `__main__` defined it.

  Raises:
    UserError: The file is missing or damaged.
  """
  name, _, _ = read_saved(epath.Path(path))
  module = name.rpartition(".")[0]
  is_ours = _known(name) is not None or allowed_symbols.within(module, _PACKAGES)
  return None if is_ours or module == "__main__" else module or name


def read_saved(path: epath.Path) -> tuple[str, dict[str, str], str]:
  """Returns the experiment, the knobs and the data mixin ("": none) that a file names.

  Raises:
    UserError: The file is missing or damaged.
  """
  try:
    text = file_io.read_bytes(path).decode()
    saved = json.loads(run_folder.with_own_paths(text, path.parent))
    name, knobs = str(saved["experiment"]), dict(saved["knobs"])
    if not all(isinstance(text, str) for text in knobs.values()):
      raise ValueError("the values of knobs are not strings")
    return name, knobs, str(saved.get("data", ""))
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
  except file_io.MALFORMED as error:
    raise UserError(f"{path} is damaged: {error}.") from None


def _known(name: str) -> type[Experiment] | None:
  """Returns the experiment if it is registered, or if this process has already defined its class.

  Using it imports nothing, so it needs no permission.
  """
  if (found := _registered(name, "fdl_config")) is not None:
    return found
  classes: dict[type[Experiment], None] = {}
  left: list[type[Experiment]] = [Experiment]
  while left:
    cls = left.pop(0)
    left += [one for one in cls.__subclasses__() if one not in classes]
    classes[cls] = None
  same = [cls for cls in classes if f"{cls.__module__}.{cls.__qualname__}" == name]
  # `with_data` makes classes of the same name.
  same = [c for c in same if c.__module__ in sys.modules and "_data" not in vars(c)]
  # If a class was defined again, as in a notebook, the old one may still be alive.
  bound = [c for c in same if getattr(sys.modules[c.__module__], c.__name__, None) is c]
  return next(iter(bound or same[::-1]), None)


def import_modules(names: Iterable[str]) -> list[types.ModuleType]:
  """Imports the modules of --fdl_allow_modules, which register experiments and so their families.

  Raises:
    UserError: One cannot be imported.
  """
  modules = []
  for name in filter(None, names):
    given = f"--fdl_allow_modules={name}"
    if not all(part.isidentifier() for part in name.split(".")):
      raise UserError(f"{given}: expected names of modules.")
    modules.append(_module(name, given))
  return modules


def _module(name: str, given: str) -> types.ModuleType:
  try:
    return allowed_symbols.import_module(name)
  except ModuleNotFoundError as error:
    if error.name and (name + ".").startswith(error.name + "."):
      raise UserError(
        f"{given}: no module {error.name}, neither in {os.getcwd()} nor installed."
      ) from None
    raise UserError(f"{given}: importing {name} failed: {error}.") from error


def _import(path: str, given: str) -> type[Experiment]:
  module_name, _, class_name = path.rpartition(".")
  module = _module(module_name, given)
  found = getattr(module, class_name, None)
  if found is None:
    classes = [
      name
      for name, value in vars(module).items()
      if isinstance(value, type)
      and issubclass(value, Experiment)
      and value.__module__ == module_name
    ]
    hint = (
      did_you_mean(class_name, classes) or f" It has: {', '.join(classes) or 'no experiments'}."
    )
    raise UserError(f"{given}: {module_name} has no {class_name}.{hint}")
  if not (isinstance(found, type) and issubclass(found, Experiment)):
    raise UserError(f"{given} is not a subclass of paxlike.experiment.Experiment.")
  return found
