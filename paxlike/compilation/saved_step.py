# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compiled steps in files: compiled without the devices, loaded on them.

A file is a line of JSON that describes what the step was compiled for, followed by XLA's serialized
executable, a protocol buffer. Everything else that JAX needs comes from lowering the step again at
load time. Nothing is unpickled, but an executable is machine code: load only files of people whose
programs you would run.
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

from paxlike import file_io
from paxlike.devices import chips, program_cache
from paxlike.errors import UserError

_FORMAT = "paxlike step 2"
# Largest sizes in bytes of the JSON line and of the executable (protocol buffers are below 2 GiB).
_MOST_HEADER, _MOST_PAYLOAD = 2**16, 2**31
# Platform -> packages that an executable depends on besides JAX.
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_COMPILERS = {"tpu": ("libtpu",), "cuda": _PLUGINS, "gpu": _PLUGINS}
# The first parameters of JAX's function that compiles a program or loads it from the cache.
_COMPILED = [
  "backend",
  "computation",
  "devices",
  "compile_options",
  "host_callbacks",
  "executable_devices",
]
# Messages for header fields whose values are digests.
_MESSAGES = {
  "arrays": "its step takes other arrays",
  "program": "its step computes something else",
  "options": "it was compiled with other options of XLA (XLA_FLAGS among them)",
}


def _header(
  lowered: jax.stages.Lowered, devices: jax.sharding.Mesh, options: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the description of what a step is compiled for."""
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
    # Covers the model, the schedule and the optimizer: everything that the step computes.
    "program": _digest(lowered.as_text().encode()),
  }
  return header


def _kind(devices: Sequence[Any]) -> str:
  """Returns the properties of devices that an executable depends on.

  An unattached GPU is an `NVIDIA H100`, an attached one an `NVIDIA H100 80GB HBM3`; what matters
  is the chip, its compute capability and its number of multiprocessors (an `NVIDIA H100 PCIe` has
  fewer). Executables for TPUs also depend on the number of slices.
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
  """Raises UserError if the file cannot be written; called before compiling."""
  file = epath.Path(path)
  try:
    if file.is_dir():
      raise UserError(f"--save={path} is a folder: name a file in it.")
    file_io.check_ends(file)  # A device file would be replaced.
    if not file.parent.is_dir():
      raise UserError(f"--save={path}: there is no folder {file.parent}.")
    if not file_io.is_remote(file):
      _part(file).write_bytes(b"")
      _part(file).unlink()
  except OSError as error:
    raise UserError(f"--save={path}: {error.strerror or error}.") from None


def check_devices(flag: str, devices: jax.sharding.Mesh):
  """Raises UserError if no step that is loaded from a file can be right on these devices."""
  if not program_cache.keeps_order(devices.devices.flat):
    raise UserError(
      f"--{flag}: in a step that is loaded from a file, XLA for CPUs does not keep the order of"
      " collectives, so that several processes would mix their values: leave it out."
    )


def _part(file: epath.Path) -> epath.Path:
  """Returns the temporary path that a file is written to before it is renamed."""
  return file.with_name(file.name + ".part")


def save(
  path: str,
  step: jax.stages.Compiled,
  lowered: jax.stages.Lowered,
  devices: jax.sharding.Mesh,
  options: Mapping[str, Any],
):
  """Writes a step, compiled from `lowered` for `devices` with XLA `options`.

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
  """Returns the step of a file, after checking that it is the compiled form of `lowered`.

  Raises:
    UserError: The file is missing, damaged, not a compiled step, or does not match.
  """
  check_devices("compiled_step", devices)
  found, payload = _read(epath.Path(path))
  if found.get("payload") != _digest(payload):
    raise UserError(f"--compiled_step={path} is damaged.")
  for name, wanted in _header(lowered, devices, options).items():
    if found.get(name) != wanted:
      text = f"it was compiled for {name} {_shown(found.get(name))}, and here it is {wanted}"
      raise UserError(
        f"--compiled_step={path} does not match this run: {_MESSAGES.get(name, text)}. Give the"
        " flags that it was compiled with, or compile it again."
      )
  try:
    with _as_compiled(payload):
      return lowered.compile(compiler_options=dict(options))
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    raise UserError(f"--compiled_step={path}: {str(error).splitlines()[0]}") from None


def _shown(value: Any) -> str:
  """Returns a header value as at most 100 printable characters."""
  return "".join(char if char.isprintable() else "?" for char in str(value))[:100]


def _serialized(step: jax.stages.Compiled) -> bytes:
  """Returns XLA's serialized executable, without JAX's metadata."""
  program: Any = step.runtime_executable()
  serialize = getattr(program, "serialize", None)
  if serialize is None:
    raise UserError(f"--save: JAX {jax.__version__} cannot serialize a program of these devices.")
  return serialize()


def _read(path: epath.Path) -> tuple[dict[str, Any], bytes]:
  """Returns the header and the payload of a file."""
  found = None
  try:
    file_io.check_ends(path)
    with path.open("rb") as file:
      line = file.readline(_MOST_HEADER)
      payload = file.read(_MOST_PAYLOAD)
  except OSError as error:
    raise UserError(f"--compiled_step={path}: {error.strerror or error}.") from None
  with contextlib.suppress(ValueError, RecursionError):
    found = json.loads(line)
  if isinstance(found, dict) and found.get("format") == "paxlike step 1":
    raise UserError(
      f"--compiled_step={path} is of an older paxlike, whose files are pickles: compile it again."
    )
  if not isinstance(found, dict) or found.get("format") != _FORMAT:
    raise UserError(f"--compiled_step={path} was not written by --mode=compile --save=FILE.")
  return found, payload


@contextlib.contextmanager
def _as_compiled(payload: bytes) -> Iterator[None]:
  """Context in which JAX loads the serialized executable instead of compiling.

  It replaces JAX's function that looks a program up in the compilation cache or compiles it, so
  that the executable is loaded like one from that cache (`jax/_src/compilation_cache.py`).

  Raises:
    UserError: This version of JAX has no such function, or uses it differently.
  """
  unknown = UserError(
    f"--compiled_step: JAX {jax.__version__} loads programs differently than 0.10 and 0.12: leave"
    " the flag out."
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
