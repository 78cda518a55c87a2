# SPDX-License-Identifier: Apache-2.0
"""What a model requires of the devices that it is going to run on."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from flax import nnx

from paxlike import layers, topology
from paxlike.errors import UserError
from paxlike.layers.decoder import Decoder


class _Requirement(NamedTuple):
  """What devices must have for a part of a model.

  Attributes:
    knob: What chooses that part.
    has: Whether a device has it.
    needed: Which ones have.
  """

  knob: str
  has: Callable[[Any], bool]
  needed: str


# Of kernels for attention, and of `Dot`s.
_REQUIREMENTS: dict[Any, _Requirement] = {
  layers.cudnn: _Requirement(
    "ATTENTION_KERNEL=cudnn", topology.has_cudnn_attention, "NVIDIA GPUs from Ampere on"
  ),
  layers.splash: _Requirement("ATTENTION_KERNEL=splash", topology.has_splash_attention, "TPUs"),
  layers.tokamax: _Requirement(
    "ATTENTION_KERNEL=tokamax", topology.has_tokamax_attention, "NVIDIA GPUs from Hopper on"
  ),
  layers.Fp8: _Requirement(
    "QUANTIZATION=fp8 (or USE_FP8)", topology.has_fp8, "NVIDIA GPUs from Ada on"
  ),
  layers.DelayedFp8: _Requirement(
    "QUANTIZATION=fp8_delayed (or USE_FP8)", topology.has_fp8, "NVIDIA GPUs from Ada on"
  ),
  layers.MxFp8: _Requirement(
    "QUANTIZATION=mxfp8", topology.has_mxfp8, "NVIDIA GPUs from Blackwell on, or QUANTIZATION=fp8"
  ),
  layers.TransformerEngine: _Requirement(
    "ENABLE_TE", topology.has_transformer_engine, "an NVIDIA GPU from Ampere on"
  ),
}


def check(model: Decoder, devices: Sequence[Any]):
  """Finds whether devices have what a model names.

  Raises:
    UserError: They have not, or Transformer Engine is not installed, or for several GPUs.
  """
  parts = set(_parts(model))
  for part, requirement in _REQUIREMENTS.items():
    if part in parts and not requirement.has(devices[0]):
      instead = ""
      if requirement.knob.startswith("ATTENTION_KERNEL"):
        instead = " Of a saved model change it by --fiddler='attention(kernel=\"auto\")'."
      raise UserError(
        f"{requirement.knob} needs {requirement.needed}, and this is a"
        f" {devices[0].device_kind}.{instead}"
      )
  if layers.TransformerEngine in parts:
    if len(devices) > 1:
      raise UserError(f"ENABLE_TE is for one GPU, and here are {len(devices)}.")
    layers.transformer_engine.load()


def check_context(model: Decoder, sizes: dict[str, int]):
  """Finds whether a kernel for shared sequences has a mesh on which they are shared.

  Raises:
    UserError: It has not.
  """
  parts = set(_parts(model))
  for kernel in (layers.context_attention.ring, layers.context_attention.gathered):
    if kernel in parts and sizes["context"] == 1:
      axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
      raise UserError(
        f"ATTENTION_KERNEL={kernel.__name__} needs a mesh whose axis context is longer than 1, but"
        f" that of ICI_MESH_SHAPE x DCN_MESH_SHAPE is {axes or 'one device'}: give it one, or take"
        " auto."
      )


def _parts(model: Decoder) -> Iterator[Any]:
  """Yields the kernels of a model, and the kinds of its `Dot`s."""
  for _, module in nnx.iter_modules(model):
    kernel: Any = getattr(module, "kernel", None)
    yield getattr(kernel, "func", kernel)
    yield type(getattr(module, "dot", None))
