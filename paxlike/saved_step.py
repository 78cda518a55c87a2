# SPDX-License-Identifier: Apache-2.0
"""A compiled step in a file: made where there are no such devices, run where they are.

The file begins with a line of JSON that says what the step was compiled for. The rest is JAX's
serialized executable, which is a pickle: load only what you trust.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath
from jax.experimental import serialize_executable

from paxlike import chips
from paxlike.errors import UserError

_FORMAT = "paxlike step 1"
# What a program depends on, by platform, beside JAX itself.
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_COMPILERS = {"tpu": ("libtpu",), "cuda": _PLUGINS, "gpu": _PLUGINS}
# What is told of a difference in what has no words of its own.
_SAID = {
  "arrays": "its step takes other arrays",
  "program": "its step computes something else",
  "options": "it was compiled with other options of XLA (XLA_FLAGS among them)",
}


def _header(
  lowered: jax.stages.Lowered, devices: jax.sharding.Mesh, options: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what a step is compiled for, by the words in which a difference is told."""
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
  """Raises UserError unless the folder of the file is there: before, not after, compiling."""
  folder = epath.Path(path).parent
  if not folder.is_dir():
    raise UserError(f"--save={path}: there is no folder {folder}.")


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
  payload, _, _ = serialize_executable.serialize(step)
  header = _header(lowered, devices, options) | {"payload": _digest(payload)}
  file = epath.Path(path)
  part = file.with_name(file.name + ".part")
  try:
    part.write_bytes(json.dumps(header).encode() + b"\n" + payload)
    part.replace(file)
  except OSError as error:
    part.unlink(missing_ok=True)
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
  try:
    line, _, payload = epath.Path(path).read_bytes().partition(b"\n")
  except OSError as error:
    raise UserError(f"--compiled_step={path}: {error.strerror or error}.") from None
  try:
    found = json.loads(line)
  except ValueError:
    found = None
  if not isinstance(found, dict) or found.get("format") != _FORMAT:
    raise UserError(f"--compiled_step={path} is no file that --mode=compile --save=FILE wrote.")
  if found.get("payload") != _digest(payload):
    raise UserError(f"--compiled_step={path} is damaged.")
  for name, wanted in _header(lowered, devices, options).items():
    if found.get(name) != wanted:
      told = f"it was compiled for {name} {found.get(name)}, and here it is {wanted}"
      raise UserError(
        f"--compiled_step={path} does not serve this run: {_SAID.get(name, told)}. Give the flags"
        " that it was compiled with, or compile it anew."
      )
  trees = jax.tree.structure(lowered.args_info), jax.tree.structure(lowered.out_info)
  try:
    return serialize_executable.deserialize_and_load(payload, *trees)
  except jax.errors.JaxRuntimeError as error:
    raise UserError(f"--compiled_step={path}: {str(error).splitlines()[0]}") from None
