# SPDX-License-Identifier: Apache-2.0
"""Names for the functions, classes and enum members of a graph, and the way back from a name.

A name is "module:qualified.name". Going back imports code and lets a graph call it, so only names
on a list resolve: what paxlike marks `@configurable`, the table below of JAX, optax and dtypes, and
what the modules that the user allows define. Modules other than paxlike's are not imported before
the name is found on the list.
"""

import enum
import importlib
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from paxlike import configurable, knob_types
from paxlike.errors import UserError


def _words(text: str) -> frozenset[str]:
  return frozenset(text.split())


# Where `@configurable` is looked for: a config file has no other module of paxlike imported.
_CONFIGURABLE = _words("""
  paxlike.best paxlike.data paxlike.evaluation paxlike.layers paxlike.mesh paxlike.objectives
  paxlike.optimizers paxlike.restoring paxlike.trainer
""")

_DTYPES = frozenset((*knob_types.DTYPES, "bool_"))
# Public module -> names that graphs may use: functions of numbers, and of functions on this list.
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

_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


def name_of(value: Any) -> str:
  """Returns the name of a function, class, class method or enum member.

  Raises:
    UserError: It has none from which it could be found again (a lambda, a local function).
  """
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
  """Returns the name as people say it: "Linear", "jax.nn.silu", "Remat.SAVE_NOTHING"."""
  try:
    return shortened(name_of(value))
  except UserError:
    return getattr(value, "__qualname__", None) or repr(value)


def shortened(name: str) -> str:
  """Returns what `short_name` gives for the thing of this name."""
  module, symbol = name.split(":")
  return f"{module}.{symbol}" if module in _LISTED and module != "builtins" else symbol


def is_symbol(value: Any) -> bool:
  """Returns whether a graph holds this value by name."""
  return isinstance(value, type | enum.Enum | types.FunctionType | types.MethodType) or (
    callable(value) and hasattr(value, "__name__") and hasattr(value, "__module__")
  )


def is_name(text: str) -> bool:
  """Returns whether text has the form "module:qualified.name"."""
  return _NAME.fullmatch(text) is not None


def check(name: str, *, allow_modules: Iterable[str] = ()):
  """Raises UserError unless `resolve` takes `name`. Imports no module but paxlike's."""
  match = _NAME.fullmatch(name)
  if not match:
    raise UserError(f"{name!r} is no name of the form module:symbol.")
  module, symbol = match.groups()
  if within(module, allow_modules) or symbol in _LISTED.get(module, ()):
    return
  if not within(module, ["paxlike"]):
    raise UserError(
      f"the config file uses {module}.{symbol}, which is not part of paxlike or of its short list."
      f" Only if you trust it: --fdl_allow_modules={module}"
    )
  if within(module, _CONFIGURABLE):
    _import(module, importlib.import_module)
  if name not in configurable.names():
    raise UserError(
      f"a config file cannot use {module}.{symbol}: paxlike has none, or not for graphs (not marked"
      " @configurable)."
    )


def resolve(name: str, *, allow_modules: Iterable[str] = ()) -> Any:
  """Returns what `name` names.

  Args:
    name: "module:qualified.name".
    allow_modules: Modules of the user; each allows its submodules too.

  Raises:
    UserError: The name is not on the list, or there is no such thing.
  """
  check(name, allow_modules=allow_modules)
  module_name, symbol = name.split(":")
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
  """Imports a module that the user named or allowed; those of the working directory count.

  That folder comes last, and stays: what paxlike imports later must not be found there first.
  """
  if os.getcwd() not in sys.path and not within(name, ["paxlike"]):
    sys.path.append(os.getcwd())
  return importlib.import_module(name)


def _import(name: str, importing: Callable[[str], types.ModuleType]) -> types.ModuleType:
  try:
    return importing(name)
  except ModuleNotFoundError as error:
    if not within(name, [error.name or ""]):
      raise
    raise UserError(f"the config file uses {name}, which cannot be found.") from None


def within(module: str, packages: Iterable[str]) -> bool:
  """Returns whether a module is one of the packages, or in one."""
  return any(module == package or module.startswith(f"{package}.") for package in packages)


def _defined(module: types.ModuleType, symbol: str) -> Any:
  """Returns what `symbol` names if `module` itself defines it, else None.

  Never follows what a module merely imports (`paxlike.x:os.system`), nor attributes of objects.
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
