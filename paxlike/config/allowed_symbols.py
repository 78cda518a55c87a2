# SPDX-License-Identifier: Apache-2.0
"""Names of the functions, classes and enum members in a graph, and their resolution.

A name is "module:qualified.name"; a `@configurable` value has a public name of that form. Resolving
a name imports code and lets a graph call it, so only allowed names resolve: `@configurable` values,
names of JAX, optax and dtypes in `_LISTED`, and definitions in modules that the user allows. Other
modules than paxlike's are imported only once a name is known to be allowed.
"""

import contextlib
import contextvars
import enum
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from paxlike.config import configurable, dtypes, old_names
from paxlike.errors import UserError


def _words(text: str) -> frozenset[str]:
  return frozenset(text.split())


# Folders of the package with configurable values.
_PACKAGES = _words("""
  paxlike.checkpoints paxlike.data paxlike.devices paxlike.layers paxlike.training
""")

_DTYPES = frozenset((*dtypes.NAMES, "bool_"))
# Public module -> names that graphs may use: types, dtypes, and functions without side effects.
_LISTED: dict[str, frozenset[str]] = {
  "builtins": _words("bool complex dict float frozenset int list set str tuple"),
  "jax.nn": _words("""
    celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
    log_softmax mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus
    sparse_sigmoid squareplus standardize swish tanh
  """),
  "jax.nn.initializers": _words("""
    constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform kaiming_normal
    kaiming_uniform lecun_normal lecun_uniform normal ones orthogonal truncated_normal uniform
    variance_scaling xavier_normal xavier_uniform zeros
  """),
  "jax.numpy": _DTYPES | {"tanh"},
  "ml_dtypes": frozenset(name for name in _DTYPES if hasattr(ml_dtypes, name)),
  "numpy": frozenset(name for name in _DTYPES if hasattr(np, name)),
  "optax": _words("""
    MultiSteps adadelta adafactor adagrad adam adamax adamaxw adamw add_decayed_weights add_noise
    amsgrad apply_every apply_if_finite centralize chain clip clip_by_block_rms clip_by_global_norm
    constant_schedule cosine_decay_schedule cosine_onecycle_schedule exponential_decay identity
    inject_hyperparams join_schedules lamb lars linear_onecycle_schedule linear_schedule lion masked
    nadam nadamw noisy_sgd novograd piecewise_constant_schedule piecewise_interpolate_schedule
    polynomial_schedule radam rmsprop scale scale_by_adam scale_by_adamax scale_by_amsgrad
    scale_by_belief scale_by_learning_rate scale_by_lion scale_by_novograd scale_by_radam
    scale_by_rms scale_by_rss scale_by_schedule scale_by_sm3 scale_by_trust_ratio set_to_zero sgd
    sgdr_schedule sm3 trace warmup_constant_schedule warmup_cosine_decay_schedule
    warmup_exponential_decay_schedule yogi zero_nans
  """),
}

CODE = "code"  # The folder of a run that has copies of the user's modules.
_COPIES: contextvars.ContextVar[str | None] = contextvars.ContextVar("_COPIES", default=None)

_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


def name_of(value: Any) -> str:
  """Returns the name of a function, class, class method or enum member.

  Raises:
    UserError: It has no name that could be resolved again (a lambda, a local function).
  """
  if public := configurable.name_of(value):
    return public
  name = getattr(value, "__name__", "")
  for module, listed in _LISTED.items():
    known = module in sys.modules and name in listed
    if known and getattr(sys.modules[module], name, None) is value:
      return f"{module}:{name}"
  owner = type(value) if isinstance(value, enum.Enum) else getattr(value, "__self__", value)
  module, symbol = getattr(owner, "__module__", None), getattr(owner, "__qualname__", None)
  if isinstance(value, enum.Enum):
    symbol = f"{symbol}.{value.name}"
  elif owner is not value:
    symbol = f"{symbol}.{value.__name__}"
  if module in sys.modules and symbol and _defined(sys.modules[module], symbol) == value:
    return f"{module}:{symbol}"
  raise UserError(f"{value!r} cannot be saved: give it a name at the top level of a module.")


def short_name(value: Any) -> str:
  """Returns a short name for messages: "Linear", "jax.nn.silu", "Remat.SAVE_NOTHING"."""
  try:
    return shortened(name_of(value))
  except UserError:
    return getattr(value, "__qualname__", None) or repr(value)


def shortened(name: str) -> str:
  """Returns the short name for a full name; see `short_name`."""
  module, symbol = name.split(":")
  return f"{module}.{symbol}" if module in _LISTED and module != "builtins" else symbol


def is_symbol(value: Any) -> bool:
  """Returns whether a graph stores this value by name."""
  return isinstance(value, type | enum.Enum | types.FunctionType | types.MethodType) or (
    callable(value) and hasattr(value, "__name__") and hasattr(value, "__module__")
  )


def foreign(names: Iterable[str]) -> list[str]:
  """Returns the modules of names that are neither paxlike's nor in `_LISTED`."""
  modules = {old_names.current(name).partition(":")[0] for name in names if is_name(name)}
  return sorted(one for one in modules if one not in _LISTED and not within(one, ["paxlike"]))


def is_name(text: str) -> bool:
  """Returns whether text has the form "module:qualified.name"."""
  return _NAME.fullmatch(text) is not None


def check(name: str, *, allow_modules: Iterable[str] = ()):
  """Raises UserError unless `name` is allowed. Imports only modules of paxlike."""
  _checked(name, allow_modules)


def check_all(names: Iterable[str], *, allow_modules: Iterable[str] = ()):
  """Raises UserError unless all `names` are allowed; the error has all modules to allow."""
  foreign: dict[str, str] = {}  # Module -> the first of its symbols.
  for name in names:
    module, symbol = _parsed(name)
    if _is_foreign(module, symbol, allow_modules):
      foreign.setdefault(module, symbol)
    else:
      _checked(name, allow_modules)
  if foreign:
    what = ", ".join(f"{module}.{symbol}" for module, symbol in list(foreign.items())[:5])
    if any(module.partition(".")[0] in sys.stdlib_module_names for module in foreign):
      raise UserError(
        f"the config file uses {what}: no graph of an experiment uses Python's standard library."
      )
    raise UserError(
      f"the config file uses {what}, which is neither part of paxlike nor on its list of allowed"
      f" names. {advice(foreign, given=allow_modules)}"
    )


def _parsed(name: str) -> tuple[str, str]:
  name = old_names.current(name)
  match = _NAME.fullmatch(name)
  if not match:
    raise UserError(f"{name!r} is not a name of the form module:symbol.")
  module, symbol = match.groups()
  return module, symbol


def _is_foreign(module: str, symbol: str, allow_modules: Iterable[str]) -> bool:
  listed = within(module, allow_modules) or symbol in _LISTED.get(module, ())
  return not listed and not within(module, ["paxlike"])


def _checked(name: str, allow_modules: Iterable[str]) -> tuple[str, str]:
  """Returns the module and the symbol of a name; raises UserError unless it is allowed."""
  module, symbol = _parsed(name)
  name = f"{module}:{symbol}"
  if within(module, allow_modules) or symbol in _LISTED.get(module, ()):
    return module, symbol
  if not within(module, ["paxlike"]):
    check_all([name], allow_modules=allow_modules)
  if configurable.find(name) is None and module in _PACKAGES:
    _import_all(module)
  if configurable.find(name) is None:
    raise UserError(
      f"a config file cannot use {module}.{symbol}: it does not exist in paxlike, or is not"
      " @configurable."
    )
  return module, symbol


def resolve(name: str, *, allow_modules: Iterable[str] = ()) -> Any:
  """Returns the value of a name.

  Args:
    name: "module:qualified.name".
    allow_modules: Modules that the user allows, including their submodules.

  Raises:
    UserError: The name is not allowed, or undefined.
  """
  module_name, symbol = _checked(name, allow_modules)
  if (marked := configurable.find(f"{module_name}:{symbol}")) is not None:
    return marked
  allowed = within(module_name, allow_modules)
  module = _import(module_name, import_module if allowed else importlib.import_module)
  if module_name in _LISTED:
    value = getattr(module, symbol, None)
    value = value if callable(value) else None
  else:
    value = _defined(module, symbol)
  if value is None:
    raise UserError(f"the config file uses {module_name}.{symbol}, which is not defined there.")
  return value


def import_module(name: str) -> types.ModuleType:
  """Imports a module that the user named or allowed, also from the working directory.

  The working directory is appended to sys.path, so that its files cannot shadow other modules.
  """
  if os.getcwd() not in sys.path and not within(name, ["paxlike"]):
    sys.path.append(os.getcwd())
  copied = _copied(name)
  if copied is None:
    return importlib.import_module(name)
  sys.path.append(copied)
  try:
    return importlib.import_module(name)
  finally:
    sys.path.remove(copied)


@contextlib.contextmanager
def copies(run: str | os.PathLike[str]) -> Iterator[None]:
  """Context in which modules that are not found elsewhere are imported from a run's copies."""
  reset = _COPIES.set(os.path.join(os.path.abspath(run), CODE))
  try:
    yield
  finally:
    _COPIES.reset(reset)


def advice(
  modules: Collection[str],
  *,
  given: Iterable[str] = (),
  folder: str | os.PathLike[str] | None = None,
) -> str:
  """Returns a sentence that says how to allow modules.

  Args:
    modules: Modules that are not allowed yet.
    given: Modules that are.
    folder: Folder of the run that uses them; None: the one of the enclosing `copies`.
  """
  with contextlib.nullcontext() if folder is None else copies(folder):
    copied = dict.fromkeys(filter(None, map(_copied, modules)))
    gone = [name for name in modules if _copied(name) is None and not _is_found(name)]
  where = f" (a copy is in {', '.join(copied)})" if copied else ""
  if gone:
    where += f", in the folder that contains {gone[0].partition('.')[0]}"
  names = ",".join(dict.fromkeys(filter(None, [*modules, *given])))
  return f"Only if you trust it{where}: --fdl_allow_modules={names}"


def _copied(name: str) -> str | None:
  """Returns the folder with a run's copy of a module; None if it is found elsewhere."""
  folder, top = _COPIES.get(), name.partition(".")[0]
  if folder is None or _is_found(name):
    return None
  return folder if _is_in(folder, top) else None


def _is_found(name: str) -> bool:
  top = name.partition(".")[0]
  if top in sys.modules or _is_in(os.getcwd(), top):
    return True
  try:
    return importlib.util.find_spec(top) is not None
  except (ImportError, ValueError):
    return False


def _is_in(folder: str, top: str) -> bool:
  return any(os.path.exists(os.path.join(folder, name)) for name in (f"{top}.py", top))


def _import_all(package: str):
  path = importlib.import_module(package).__path__
  for module in pkgutil.walk_packages(path, f"{package}."):
    importlib.import_module(module.name)


def _import(name: str, importing: Callable[[str], types.ModuleType]) -> types.ModuleType:
  try:
    return importing(name)
  except ModuleNotFoundError as error:
    if not within(name, [error.name or ""]):
      raise
    raise UserError(f"the config file uses {name}, which cannot be found.") from None


def within(module: str, packages: Iterable[str]) -> bool:
  """Returns whether a module is one of the packages or a submodule of one."""
  return any(module == package or module.startswith(f"{package}.") for package in packages)


def _defined(module: types.ModuleType, symbol: str) -> Any:
  """Returns the value of `symbol` if `module` itself defines it, else None.

  Never follows imports of the module (`paxlike.x:os.system`) or attributes of objects.
  """
  *outer, last = symbol.split(".")
  owner: Any = module
  for part in outer:
    owner = vars(owner).get(part)
    if not isinstance(owner, type):
      return None
  if outer and (owner.__module__, owner.__qualname__) != (module.__name__, ".".join(outer)):
    return None
  if isinstance(owner, enum.EnumType) and last in owner.__members__:
    return owner[last]
  value = inspect.getattr_static(owner, last, None) if outer else vars(owner).get(last)
  if isinstance(value, classmethod | staticmethod):
    packages = (module.__name__.split(".")[0], "paxlike")
    return getattr(owner, last) if within(value.__func__.__module__, packages) else None
  place = (getattr(value, "__module__", None), getattr(value, "__qualname__", None))
  return value if callable(value) and place == (module.__name__, symbol) else None
