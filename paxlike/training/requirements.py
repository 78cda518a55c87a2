# SPDX-License-Identifier: Apache-2.0
"""Checks that devices support the parts of a model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from flax import nnx

from paxlike import layers
from paxlike.devices import topology
from paxlike.errors import UserError
from paxlike.layers.decoder import Decoder


class _Requirement(NamedTuple):
  """The devices that support a part of a model.

  Attributes:
    knob: The knob that selects the part.
    has: Returns whether a device supports it.
    needed: The devices that support it, in words.
    instead: What to use on other devices.
  """

  knob: str
  has: Callable[[Any], bool]
  needed: str
  instead: str


_AUTO = "use auto (for a saved model --fiddler='attention(kernel=\"auto\")')"
_NONE = "use QUANTIZATION=none"
_TE = "ENABLE_TE (transformer_engine)"


# By attention kernel or type of `Dot`.
_REQUIREMENTS: dict[Any, _Requirement] = {
  **{
    kernel.function: _Requirement(
      f"ATTENTION_KERNEL={name}", kernel.supports, kernel.devices, _AUTO
    )
    for name, kernel in layers.KERNELS.items()
  },
  layers.Fp8: _Requirement(
    "QUANTIZATION=fp8 (or USE_FP8)", topology.has_fp8, "NVIDIA GPUs from Ada on", _NONE
  ),
  layers.DelayedFp8: _Requirement(
    "QUANTIZATION=fp8_delayed", topology.has_fp8, "NVIDIA GPUs from Ada on", _NONE
  ),
  layers.MxFp8: _Requirement(
    "QUANTIZATION=mxfp8", topology.has_mxfp8, "NVIDIA GPUs from Blackwell on", "use fp8"
  ),
  layers.TransformerEngine: _Requirement(
    _TE, topology.has_transformer_engine, "an NVIDIA GPU from Ampere on", "leave it out"
  ),
}


def check(model: Decoder, devices: Sequence[Any]):
  """Checks that devices support a model.

  Raises:
    UserError: They do not; or Transformer Engine is not installed, or there are several GPUs.
  """
  parts = set(_parts(model))
  for part, requirement in _REQUIREMENTS.items():
    if part in parts and not requirement.has(devices[0]):
      raise UserError(
        f"{requirement.knob} needs {requirement.needed}, but the device is"
        f" {devices[0].device_kind}: {requirement.instead}."
      )
  if layers.TransformerEngine in parts:
    if len(devices) > 1:
      raise UserError(f"{_TE} supports one GPU, but there are {len(devices)}.")
    try:
      layers.transformer_engine.load()
    except UserError as error:
      raise UserError(f"{_TE}: {error}") from error


def check_context(model: Decoder, sizes: dict[str, int]):
  """Checks that a context-parallel kernel has a mesh with context parallelism.

  Raises:
    UserError: The mesh axis context has size 1.
  """
  parts = set(_parts(model))
  for name, kernel in layers.KERNELS.items():
    if kernel.is_context_parallel and kernel.function in parts and sizes["context"] == 1:
      axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
      raise UserError(
        f"ATTENTION_KERNEL={name} needs a mesh axis context larger than 1, but the mesh"
        f" of ICI_MESH_SHAPE x DCN_MESH_SHAPE is {axes or 'one device'}: set the axis, or use auto."
      )


def _parts(model: Decoder) -> Iterator[Any]:
  """Yields the kernels of a model and the types of its `Dot`s; for TE in fp8 also Fp8."""
  for _, module in nnx.iter_modules(model):
    if hasattr(module, "requirements"):
      kernel: Any = getattr(module, "kernel", None)
      yield getattr(kernel, "func", kernel)
    dot: Any = getattr(module, "dot", None)
    yield type(dot)
    if isinstance(dot, layers.TransformerEngine) and dot.fp8:
      yield layers.Fp8
