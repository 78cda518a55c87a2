# SPDX-License-Identifier: Apache-2.0
"""Attention with tokamax's kernels, on NVIDIA GPUs."""

import importlib
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from absl import flags

from paxlike.config.configurable import configurable
from paxlike.errors import ArgumentError
from paxlike.layers.attention.kernels import AttentionOptions, refuse, segment_starts
from paxlike.layers.attention.sharded_kernel import per_device


@configurable
def tokamax(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  implementation: str = "mosaic_gpu",
  **options: Unpack[AttentionOptions],
) -> jax.Array:
  """Flash attention (FlashAttention-3; Shah et al., 2024): memory linear in T; see `Kernel`.

  Segments are runs of equal ids. `implementation` is one of tokamax's: "mosaic_gpu" is for Hopper
  and Blackwell; "xla", for tests, runs on any backend and materializes T x S logits.

  Raises:
    UserError: tokamax is not installed, sinks or both a bias and a soft cap are set, or the
      implementation does not support the inputs.
  """
  refuse(tokamax, options, "sinks_N")
  window, soft_cap = options.get("window"), options.get("soft_cap")
  # tokamax applies the soft cap to logits + bias.
  if soft_cap is not None and options.get("bias_NTS") is not None:
    raise ArgumentError("kernel=tokamax does not support bias_NTS with soft_cap: use xla_chunked.")
  library, api = _library()

  def local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments_BT: jax.Array | None,
    bias_NTS: jax.Array | None,
  ) -> jax.Array:
    chosen: Any = implementation
    if segments_BT is not None:
      chosen = _packed(api.IMPLEMENTATIONS[implementation], starts(segments_BT)[:, None])
    return library.dot_product_attention(
      q,
      k,
      v,
      bias_NTS,
      scale=options["scale"],
      is_causal=True,
      local_window_size=None if window is None else (window - 1, 0),
      logits_soft_cap=soft_cap,
      implementation=(chosen,),
    )

  try:
    return per_device(local, q_BTNH, k_BSKH, v_BSKH, options, "segments_BT", "bias_NTS")
  except NotImplementedError as error:
    raise ArgumentError(f"kernel=tokamax: {error} Use xla_chunked.") from error


def starts(segments_BT: jax.Array) -> jax.Array:
  """Returns int32 [B, T]: the first position of each token's run of equal segment ids."""
  places = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
  return jax.lax.cummax(jnp.where(segment_starts(segments_BT), places, 0), axis=1)


def _packed(implementation: Callable[..., jax.Array], starts_B1T: jax.Array) -> Any:
  """Returns the implementation with a segment mask.

  tokamax's public function takes only a T x S mask; its kernels also take a first key per query.
  """

  def attend(*arrays: jax.Array, mask: Any, **options: Any) -> jax.Array:
    return implementation(*arrays, mask=mask & type(mask)(k_start=starts_B1T), **options)

  return attend


def _library() -> tuple[Any, Any]:
  try:
    library = importlib.import_module("tokamax")
    api = importlib.import_module("tokamax._src.ops.attention.api")
  except ImportError as error:
    raise ArgumentError(
      f"kernel=tokamax needs tokamax: pip install 'paxlike[tokamax]' ({error})."
    ) from None
  # Otherwise tokamax would parse its own flags from our command line.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  return library, api
