# SPDX-License-Identifier: Apache-2.0
"""A compiled step in a file: made where there are no such devices, run where they are.

The file begins with a line of JSON that says what the step was compiled for. The rest is JAX's
serialized executable, which is a pickle: load only what you trust.
"""

import hashlib
import importlib.metadata
import json
from typing import Any

import jax
from etils import epath
from jax.experimental import serialize_executable

from paxlike.errors import UserError

_FORMAT = "paxlike step 1"
# What a program depends on, by platform, beside JAX itself.
_COMPILERS = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin", "gpu": "jax-cuda13-plugin"}


def _header(lowered: jax.stages.Lowered, devices: jax.sharding.Mesh) -> dict[str, Any]:
  """Returns what a step is compiled for, by the words in which a difference is told."""
  first = devices.devices.flat[0]
  packages = ["jax", "jaxlib", *filter(None, [_COMPILERS.get(first.platform)])]
  header = {"format": _FORMAT}
  header |= {f"version of {name}": importlib.metadata.version(name) for name in packages}
  header |= {
    "device": f"{devices.size} x {first.device_kind}",
    "mesh": ", ".join(f"{axis} {size}" for axis, size in devices.shape.items() if size > 1),
    "arrays": _digest(str(lowered.in_avals)),
    # Also of the model, the schedule and the optimizer: all that the step computes.
    "program": _digest(lowered.as_text()),
  }
  return header


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def save(
  path: str, step: jax.stages.Compiled, lowered: jax.stages.Lowered, devices: jax.sharding.Mesh
):
  """Writes a step, compiled from `lowered` for `devices`.

  Raises:
    UserError: It cannot be written.
  """
  payload, _, _ = serialize_executable.serialize(step)
  file = epath.Path(path)
  part = file.with_name(file.name + ".part")
  try:
    part.write_bytes(json.dumps(_header(lowered, devices)).encode() + b"\n" + payload)
    part.rename(file)
  except OSError as error:
    raise UserError(f"--save={path}: {error.strerror or error}.") from None


def load(path: str, lowered: jax.stages.Lowered, devices: jax.sharding.Mesh) -> jax.stages.Compiled:
  """Returns the step of a file, if it is what compiling `lowered` for `devices` would give.

  Raises:
    UserError: There is no such file, it is no step, or it is another.
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
  for name, wanted in _header(lowered, devices).items():
    if found.get(name) == wanted:
      continue
    if name in ("arrays", "program"):
      what = "takes other arrays" if name == "arrays" else "computes something else"
      said = f"its step {what}; flags must be those that it was compiled with"
    else:
      said = f"it was compiled for {name} {found.get(name)}, and here it is {wanted}"
    raise UserError(f"--compiled_step={path} does not serve this run: {said}.")
  tree = jax.tree.structure
  try:
    return serialize_executable.deserialize_and_load(
      payload, tree(lowered.args_info), tree(lowered.out_info)
    )
  except Exception as error:
    raise UserError(f"--compiled_step={path} is damaged ({type(error).__name__}).") from None
