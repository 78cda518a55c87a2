# SPDX-License-Identifier: Apache-2.0
"""Selection of an attention kernel by device, dtype and options."""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh, topology
from paxlike.layers.attention.chunked import xla_chunked
from paxlike.layers.attention.context_parallel import gathered, ring
from paxlike.layers.attention.cudnn import COUNTS_KEY_HEADS, MAX_SEGMENTS, cudnn, has_widths
from paxlike.layers.attention.flash_cpu import flash_cpu
from paxlike.layers.attention.kernels import AttentionOptions, Requirements, name_of, xla
from paxlike.layers.attention.splash import splash

_EXTRAS = ("soft_cap", "sinks_N", "bias_NTS")


class Place(NamedTuple):
  """The hardware that attention runs on.

  Attributes:
    device: Any device of the mesh; all are of one kind.
    context: Size of the mesh axis `context`.
  """

  device: Any
  context: int = 1

  @classmethod
  def on(cls, devices: jax.sharding.Mesh) -> "Place":
    """Returns the hardware of a mesh."""
    return cls(devices.devices.flat[0], devices.shape["context"])


@configurable
def auto(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  max_segments: ranges.Size = MAX_SEGMENTS,
  **options: Unpack[AttentionOptions],
) -> jax.Array:
  """Attention with the kernel that `best` selects; see `Kernel`. `max_segments` is for cudnn."""
  requirements = Requirements(
    dtype=q_BTNH.dtype,
    num_heads=q_BTNH.shape[2],
    num_kv_heads=k_BSKH.shape[2],
    width=q_BTNH.shape[3],
    value_width=v_BSKH.shape[3],
    is_packed=options["segments_BT"] is not None,
    extras=tuple(name for name in _EXTRAS if options.get(name) is not None),
  )
  place = Place(topology.devices()[0], mesh.sizes_here(mesh.AXES).get("context", 1))
  kernel = best(requirements, place)
  if kernel is cudnn:
    return cudnn(q_BTNH, k_BSKH, v_BSKH, max_segments=max_segments, **options)
  return kernel(q_BTNH, k_BSKH, v_BSKH, **options)


def best(requirements: Requirements, place: Place) -> Callable[..., jax.Array]:
  """Returns the kernel that `auto` uses.

  ring if sequences are sharded (context > 1) and there is no bias. Else cudnn on NVIDIA GPUs from
  Ampere on, splash on TPUs and flash_cpu on CPUs. If that kernel does not meet the requirements,
  xla on CPUs and else xla_chunked. Other devices use xla_chunked.
  """
  device = place.device
  biased = "bias_NTS" in requirements.extras
  if place.context > 1 and not biased:
    return ring
  if topology.has_cudnn_attention(device):
    return cudnn if _suits_cudnn(requirements, device) else xla_chunked
  if topology.has_splash_attention(device):
    return xla_chunked if biased else splash
  if device.platform == "cpu":
    return xla if requirements.extras else flash_cpu
  return xla_chunked


def _suits_cudnn(requirements: Requirements, device: Any) -> bool:
  if requirements.extras or requirements.dtype not in (jnp.bfloat16, jnp.float16):
    return False
  if not has_widths(requirements.width, requirements.value_width):
    return False
  is_simple = not requirements.is_packed and requirements.width == requirements.value_width <= 128
  return is_simple or topology.has_packed_cudnn_attention(device)


def in_effect(kernel: Any, requirements: Requirements, place: Place) -> Any:
  """Returns the kernel that a model configured with `kernel` runs; see `best`."""
  kernel = getattr(kernel, "func", kernel)
  if kernel is auto:
    return best(requirements, place)
  return xla_chunked if kernel in (ring, gathered) and place.context == 1 else kernel


def described(kernel: Any, requirements: Requirements) -> str:
  """Returns the user-facing name of a kernel, with a note if it repeats KV heads."""
  name = name_of(kernel)
  is_grouped = requirements.num_heads != requirements.num_kv_heads
  if kernel is not cudnn or not requirements.is_packed or not is_grouped or COUNTS_KEY_HEADS:
    return name
  return f"{name} (KV heads repeated, because JAX before 0.12 miscomputes packed offsets)"
