# SPDX-License-Identifier: Apache-2.0
"""A restricted unpickler for files of `torch.save`, which can build weights and nothing else.

It supports only the opcodes and globals that torch writes. A file cannot make it import or call
anything else, and its memory and time are bounded by a multiple of the pickle's length.
"""

import io
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from paxlike.convert import safetensors_files
from paxlike.errors import UserError

_STORAGES: dict[str, Any] = {
  "DoubleStorage": np.float64,
  "FloatStorage": np.float32,
  "HalfStorage": np.float16,
  "BFloat16Storage": ml_dtypes.bfloat16,
  "LongStorage": np.int64,
  "IntStorage": np.int32,
  "ShortStorage": np.int16,
  "CharStorage": np.int8,
  "ByteStorage": np.uint8,
  "BoolStorage": np.bool_,
}
_MAX_INSTRUCTIONS = 1_000_000  # Enough for 25,000 tensors.


class TorchStorage(NamedTuple):
  """An entry of the archive: its name, the dtype of its elements and their number."""

  key: str
  dtype: np.dtype
  size: int


class Tensor(NamedTuple):
  """A contiguous slice of a storage: the index of its first element, and the shape."""

  storage: TorchStorage
  first: int
  shape: tuple[int, ...]


class _Damaged(ValueError):
  pass


_MARK = object()


def load(content: bytes) -> Any:
  """Returns the value of a pickle: mappings, lists, tuples, numbers, strings and `Tensor`s.

  Raises:
    UserError: It is damaged, or needs anything else.
  """
  machine = _Machine()
  try:
    for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(content))):
      if number == _MAX_INSTRUCTIONS:
        raise _Damaged(f"more than {_MAX_INSTRUCTIONS:,} instructions")
      if opcode.name == "STOP":
        return machine.pop()
      machine.step(opcode.name, argument)
  except UserError:
    raise
  except (ValueError, TypeError, IndexError, KeyError, OverflowError, UnicodeError) as error:
    raise UserError(f"is damaged: {error}") from None
  raise UserError("is damaged: it is cut short")


class _Machine:
  """Pickle's virtual machine: a stack and a memo."""

  def __init__(self):
    self._stack: list[Any] = []
    self._memo: dict[int, Any] = {}

  def pop(self) -> Any:
    """Pops the top of the stack."""
    if not self._stack or self._stack[-1] is _MARK:
      raise _Damaged("an instruction lacks its argument")
    return self._stack.pop()

  def step(self, name: str, argument: Any):
    """Executes one instruction."""
    if name in _VALUES:
      self._stack.append(argument)
    elif name in _MAKERS:
      self._stack.append(_MAKERS[name]())
    elif name in ("BINPUT", "LONG_BINPUT"):
      self._memo[argument] = self._top()
    elif name in ("BINGET", "LONG_BINGET"):
      self._stack.append(self._memo[argument])
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
      taken = [self.pop() for _ in range(int(name[-1]))]
      self._stack.append(tuple(reversed(taken)))
    elif name in _STEPS:
      _STEPS[name](self, argument)
    elif name not in ("PROTO", "FRAME"):
      raise UserError(f"holds more than weights: the instruction {name}")

  def _top(self) -> Any:
    if not self._stack or self._stack[-1] is _MARK:
      raise _Damaged("an instruction lacks its argument")
    return self._stack[-1]

  def _marked(self) -> list[Any]:
    """Pops the values above the last mark, and the mark."""
    taken = []
    while self._stack:
      value = self._stack.pop()
      if value is _MARK:
        return taken[::-1]
      taken.append(value)
    raise _Damaged("a mark is missing")

  def _tuple(self, argument: Any):
    del argument
    self._stack.append(tuple(self._marked()))

  def _append(self, argument: Any):
    del argument
    self._extend([self.pop()])

  def _appends(self, argument: Any):
    del argument
    self._extend(self._marked())

  def _extend(self, values: list[Any]):
    target = self._top()
    if not isinstance(target, list):
      raise _Damaged("the target of an append is not a list")
    target.extend(values)

  def _set_item(self, argument: Any):
    del argument
    value, key = self.pop(), self.pop()
    self._update([key, value])

  def _set_items(self, argument: Any):
    del argument
    self._update(self._marked())

  def _update(self, items: list[Any]):
    target = self._top()
    if not isinstance(target, dict) or len(items) % 2:
      raise _Damaged("the target of an item is not a mapping")
    for key, value in zip(items[::2], items[1::2], strict=True):
      if not isinstance(key, str | int):
        raise _Damaged("a key is neither a string nor an integer")
      target[key] = value

  def _global(self, argument: Any):
    module, _, name = str(argument).partition(" ")
    self._find(module, name)

  def _stack_global(self, argument: Any):
    del argument
    name, module = self.pop(), self.pop()
    if not (isinstance(module, str) and isinstance(name, str)):
      raise _Damaged("a global has no name")
    self._find(module, name)

  def _memoize(self, argument: Any):
    del argument
    self._memo[len(self._memo)] = self._top()

  def _find(self, module: str, name: str):
    if module == "torch" and name in _STORAGES:
      self._stack.append(np.dtype(_STORAGES[name]))
    elif (module, name) in _FUNCTIONS:
      self._stack.append(_FUNCTIONS[module, name])
    else:
      raise UserError(f"holds more than weights: it needs {module}.{name}")

  def _persistent(self, argument: Any):
    del argument
    match self.pop():
      case ("storage", np.dtype() as dtype, str(key), _, int(size)) if 0 <= size < 2**63:
        self._stack.append(TorchStorage(key, dtype, size))
      case _:
        raise _Damaged("a storage lacks its dtype, name or size")

  def _reduce(self, argument: Any):
    del argument
    arguments, function = self.pop(), self.pop()
    if not isinstance(arguments, tuple) or function not in _FUNCTIONS.values():
      raise _Damaged("a call of something that is not a function")
    self._stack.append(function(*arguments))

  def _build(self, argument: Any):
    """Ignores the metadata that `state_dict` attaches to the mapping of weights."""
    del argument
    self.pop()
    if not isinstance(self._top(), dict):
      raise _Damaged("the target of a state is not a mapping")


def _mapping(*items: Any) -> dict[Any, Any]:
  if items not in ((), ([],)):
    raise _Damaged("an OrderedDict is not created empty")
  return {}


def _tensor(storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
  if not (isinstance(storage, TorchStorage) and safetensors_files.is_shape((first,))):
    raise _Damaged("a tensor has no storage or an invalid offset")
  if not (
    safetensors_files.is_shape(shape)
    and safetensors_files.is_shape(strides)
    and len(shape) == len(strides)
  ):
    raise _Damaged("a tensor has an invalid shape")
  dense = 1
  for size, stride in zip(reversed(shape), reversed(strides), strict=True):
    if size > 1 and stride != dense:
      raise UserError("holds a tensor that is a view of another")
    dense *= size
  if first + dense > storage.size:
    raise _Damaged("a tensor ends after its storage")
  return Tensor(storage, first, tuple(shape))


def _parameter(tensor: Any, *_: Any) -> Tensor:
  if not isinstance(tensor, Tensor):
    raise _Damaged("a parameter is not a tensor")
  return tensor


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
  ("collections", "OrderedDict"): _mapping,
  ("torch._utils", "_rebuild_tensor_v2"): _tensor,
  ("torch._utils", "_rebuild_parameter"): _parameter,
}
_VALUES = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_MAKERS: dict[str, Callable[[], Any]] = {
  "MARK": lambda: _MARK,
  "NONE": lambda: None,
  "NEWTRUE": lambda: True,
  "NEWFALSE": lambda: False,
  "EMPTY_DICT": dict,
  "EMPTY_LIST": list,
  "EMPTY_TUPLE": tuple,
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
  "TUPLE": _Machine._tuple,
  "APPEND": _Machine._append,
  "APPENDS": _Machine._appends,
  "SETITEM": _Machine._set_item,
  "SETITEMS": _Machine._set_items,
  "GLOBAL": _Machine._global,
  "STACK_GLOBAL": _Machine._stack_global,
  "MEMOIZE": _Machine._memoize,
  "BINPERSID": _Machine._persistent,
  "REDUCE": _Machine._reduce,
  "BUILD": _Machine._build,
}
