# SPDX-License-Identifier: Apache-2.0
"""A compiled step in a file: made where there are no such devices, run where they are.

The file begins with a line of JSON that says what the step was compiled for. The rest is the
program as XLA serializes it, a protocol buffer. All else that JAX knows of a step comes from
lowering it where it is loaded. Nothing is unpickled; but a program is machine code of whoever
compiled it, so take one from somebody whose programs you would run.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from paxlike import chips, run_folder
from paxlike.errors import UserError

_FORMAT = "paxlike step 2"
# Bytes: of the line of JSON, and of a program, which as a protocol buffer has less than 2 GiB.
_MOST_HEADER, _MOST_PAYLOAD = 2**16, 2**31
# What a program depends on, by platform, beside JAX itself.
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_COMPILERS = {"tpu": ("libtpu",), "cuda": _PLUGINS, "gpu": _PLUGINS}
# What JAX gives the function that compiles a program or finds it in the cache.
_COMPILED = [
  "backend",
  "computation",
  "devices",
  "compile_options",
  "host_callbacks",
  "executable_devices",
]
# Messages for header fields whose values mean nothing to a person.
_SAID = {
  "arrays": "its step takes other arrays",
  "program": "its step computes something else",
  "options": "it was compiled with other options of XLA (XLA_FLAGS among them)",
}


def _header(
  lowered: jax.stages.Lowered, devices: jax.sharding.Mesh, options: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what a step is compiled for, by the names that messages use."""
  every = devices.devices.flat
  names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
  flags = sorted({flag for name in names for flag in os.environ.get(name, "").split()})
  packages = ["jax", "jaxlib", *_COMPILERS.get(every[0].platform, ())]
  header = {"format": _FORMAT}
  header |= {f"version of {name}": _version(name) for name in packages}
  header |= {
    "device": f"{devices.size} x {_kind(list(every))}",
    "mesh": ", ".join(f"{axis} {size}" for axis, size in devices.shape.items() if size > 1),
    "options": _digest(f"{sorted(options.items())} {flags}".encode()),
    "arrays": _digest(str(lowered.in_avals).encode()),
    # Also of the model, the schedule and the optimizer: all that the step computes.
    "program": _digest(lowered.as_text().encode()),
  }
  return header


def _kind(devices: Sequence[Any]) -> str:
  """Returns the kind of devices, as far as a program depends on it.

  A GPU that is only named is an `NVIDIA H100`, one that is there an `NVIDIA H100 80GB HBM3`; what
  counts is the chip, its compute capability and its multiprocessors, of which an `NVIDIA H100 PCIe`
  has fewer. Programs for TPUs depend on their slices too.
  """
  kind = devices[0].device_kind
  if capability := getattr(devices[0], "compute_capability", None):
    cores = getattr(devices[0], "core_count", "unknown")
    return f"{chips.name(kind) or kind}, compute capability {capability}, multiprocessors: {cores}"
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  return f"{kind}, slices: {slices}"


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "unknown"


def _digest(contents: bytes) -> str:
  return hashlib.sha256(contents).hexdigest()


def check(path: str):
  """Raises UserError if the file cannot be written: before, not after, compiling."""
  file = epath.Path(path)
  try:
    if file.is_dir():
      raise UserError(f"--save={path} is a folder: name a file in it.")
    run_folder.check_ends(file)  # A device would be replaced by the file.
    if not file.parent.is_dir():
      raise UserError(f"--save={path}: there is no folder {file.parent}.")
    if not run_folder.is_remote(file):
      _part(file).write_bytes(b"")
      _part(file).unlink()
  except OSError as error:
    raise UserError(f"--save={path}: {error.strerror or error}.") from None


def _part(file: epath.Path) -> epath.Path:
  """Returns where a file is written before it is whole."""
  return file.with_name(file.name + ".part")


def save(
  path: str,
  step: jax.stages.Compiled,
  lowered: jax.stages.Lowered,
  devices: jax.sharding.Mesh,
  options: Mapping[str, Any],
):
  """Writes a step, compiled from `lowered` for `devices` with `options` of XLA.

  Raises:
    UserError: It cannot be written.
  """
  payload = _serialized(step)
  header = _header(lowered, devices, options) | {"payload": _digest(payload)}
  file = epath.Path(path)
  part = _part(file)
  try:
    part.write_bytes(json.dumps(header).encode() + b"\n" + payload)
    part.replace(file)
  except OSError as error:
    with contextlib.suppress(OSError):
      part.unlink()
    raise UserError(f"--save={path}: {error.strerror or error}.") from None


def load(
  path: str,
  lowered: jax.stages.Lowered,
  devices: jax.sharding.Mesh,
  options: Mapping[str, Any],
) -> jax.stages.Compiled:
  """Returns the step of a file, if it is what compiling `lowered` so would give.

  Raises:
    UserError: There is no such file, it is no step or a damaged one, or it is another.
  """
  found, payload = _read(epath.Path(path))
  if found.get("payload") != _digest(payload):
    raise UserError(f"--compiled_step={path} is damaged.")
  for name, wanted in _header(lowered, devices, options).items():
    if found.get(name) != wanted:
      text = f"it was compiled for {name} {_shown(found.get(name))}, and here it is {wanted}"
      raise UserError(
        f"--compiled_step={path} does not serve this run: {_SAID.get(name, text)}. Give the flags"
        " that it was compiled with, or compile it anew."
      )
  try:
    with _as_compiled(payload):
      return lowered.compile(compiler_options=dict(options))
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    raise UserError(f"--compiled_step={path}: {str(error).splitlines()[0]}") from None


def _shown(value: Any) -> str:
  """Returns what a header says, as fits a line of a terminal."""
  return "".join(char if char.isprintable() else "?" for char in str(value))[:100]


def _serialized(step: jax.stages.Compiled) -> bytes:
  """Returns a program as XLA has it, without what JAX knows of it beside."""
  program: Any = step.runtime_executable()
  serialize = getattr(program, "serialize", None)
  if serialize is None:
    raise UserError(f"--save: JAX {jax.__version__} cannot serialize a program of these devices.")
  return serialize()


def _read(path: epath.Path) -> tuple[dict[str, Any], bytes]:
  """Returns the header and the payload of a file."""
  found = None
  try:
    run_folder.check_ends(path)
    with path.open("rb") as file:
      line = file.readline(_MOST_HEADER)
      payload = file.read(_MOST_PAYLOAD)
  except OSError as error:
    raise UserError(f"--compiled_step={path}: {error.strerror or error}.") from None
  with contextlib.suppress(ValueError, RecursionError):
    found = json.loads(line)
  if isinstance(found, dict) and found.get("format") == "paxlike step 1":
    raise UserError(
      f"--compiled_step={path} is of an older paxlike, whose files are pickles: compile it anew."
    )
  if not isinstance(found, dict) or found.get("format") != _FORMAT:
    raise UserError(f"--compiled_step={path} is no file that --mode=compile --save=FILE wrote.")
  return found, payload


@contextlib.contextmanager
def _as_compiled(payload: bytes) -> Iterator[None]:
  """Context in which JAX takes a serialized program for the one that it is to compile.

  The function that is replaced returns what is in JAX's cache of programs, or compiles; so the
  program is loaded as one from that cache is (`jax/_src/compilation_cache.py`).

  Raises:
    UserError: This JAX has no such function, or does not use it so.
  """
  unknown = UserError(
    f"--compiled_step: JAX {jax.__version__} loads programs otherwise than 0.10 and 0.12 do: leave"
    " it out."
  )
  try:
    compiler: Any = importlib.import_module("jax._src.compiler")
    original = compiler.compile_or_get_cached
    known = [*inspect.signature(original).parameters][: len(_COMPILED)] == _COMPILED
  except (ImportError, AttributeError):
    raise unknown from None
  if not known:
    raise unknown
  thread, programs = threading.get_ident(), []

  def load(
    backend: Any,
    computation: Any,
    devices: Any,
    compile_options: Any,
    host_callbacks: Any,
    executable_devices: Any,
    *more: Any,
  ) -> Any:
    if threading.get_ident() != thread:
      args = backend, computation, devices, compile_options, host_callbacks, executable_devices
      return original(*args, *more)
    if host_callbacks:
      raise UserError("--compiled_step: a step that calls Python on the host cannot be loaded.")
    programs.append(backend.deserialize_executable(payload, executable_devices, compile_options))
    return programs[-1]

  compiler.compile_or_get_cached = load
  try:
    yield
  finally:
    compiler.compile_or_get_cached = original
  if len(programs) != 1:
    raise unknown
