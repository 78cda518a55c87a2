# SPDX-License-Identifier: Apache-2.0
"""Edits of a whole graph, by type and by role, never by path.

Each takes the root graph and changes it in place; `--fiddler=precision(dtype="float32")` applies
one from the command line. Experiments apply theirs in a fixed order: precision, quantize,
transformer_engine, lora, attention, segments, remat, stack.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
from fiddle import daglish, selectors

from paxlike import layers, topology
from paxlike.errors import UserError, did_you_mean
from paxlike.mesh import MeshSpec
from paxlike.trainer import Trainer

_ATTENTION = ("query", "key", "value", "output", "query_down", "latent", "key_value")
_MLP = ("up", "gate", "down")
_BLOCK = _ATTENTION + _MLP
_KERNELS = ("auto", "xla", "xla_chunked", "cudnn", "splash", "tokamax", "ring", "gathered")
_DOTS = {"fp8": layers.Fp8, "fp8_delayed": layers.DelayedFp8, "int8": layers.Int8}
_DOTS |= {"mxfp8": layers.MxFp8}
# What `hold` names; a base under adapters has int8 in blocks of 64.
_SCHEMES = {
  "int8": layers.quantization.int8_columns,
  "int4": layers.quantization.int4,
  "nf4": layers.quantization.nf4,
}
# What LORA_TARGET_LAYERS names.
LORA_ROLES = {"all": _BLOCK, "attention": _ATTENTION, "mlp": _MLP}


def select(graph: fdl.Buildable, kind: Callable[..., Any], *roles: str) -> Iterator[Any]:
  """Yields every node of `graph` that makes a `kind`, with one of `roles` if any are given.

  A function is the kind of what calls it.
  """
  for node in selectors.select(graph, kind, check_nonempty=False):
    if not roles or getattr(node, "role", None) in roles:
      yield node


def _matrices(graph: fdl.Buildable) -> Iterator[Any]:
  """Yields the linear maps and experts of the blocks of `graph`."""
  for kind in (layers.Linear, layers.ExpertLinear):
    yield from select(graph, kind, *_BLOCK)


def _having(graph: fdl.Buildable, argument: str) -> Iterator[Any]:
  """Yields every node of `graph` to which `argument` is given."""
  for node, _ in daglish.iterate(graph):
    if isinstance(node, fdl.Buildable) and argument in node.__arguments__:
      yield node


def precision(graph: fdl.Buildable, dtype: str = "bfloat16"):
  """Makes every layer but routers compute in `dtype`. Weights, statistics, loss stay float32."""
  computing = (
    layers.Linear,
    layers.Lora,
    layers.ExpertLinear,
    layers.Embedding,
    layers.PositionEmbedding,
    layers.LayerNorm,
    layers.RmsNorm,
  )
  for kind in computing:
    for node in select(graph, kind):
      if getattr(node, "role", None) != "router":
        node.dtype = jnp.dtype(dtype)


def attention(graph: fdl.Buildable, kernel: str = "auto"):
  """Chooses what computes attention: a name of `_KERNELS`.

  `auto` is ring where it can and devices share the tokens of a sequence, else cudnn on GPUs that
  have it and splash on TPUs, where they can, xla on CPUs, and else xla_chunked.
  """
  if kernel not in _KERNELS:
    hint = did_you_mean(kernel, _KERNELS) or f" One of {', '.join(_KERNELS)}."
    raise UserError(f"no attention kernel {kernel}.{hint}")
  device = topology.devices()[0]
  sizes = _mesh(graph).on(len(topology.devices()))
  _check_kernel(kernel, device, sizes)
  functions = {
    "xla": layers.attention_kernels.xla,
    "xla_chunked": layers.xla_chunked,
    "cudnn": fdl.Partial(layers.cudnn),
    "splash": layers.splash,
    "tokamax": layers.tokamax,
    "ring": layers.context_attention.ring,
    "gathered": layers.context_attention.gathered,
  }
  shares_time = sizes["context"] > 1
  for kind in (layers.Attention, layers.LatentAttention):
    for node in select(graph, kind):
      name = _best(node, device, shares_time) if kernel == "auto" else kernel
      node.kernel = copy.deepcopy(functions[name])


def segments(graph: fdl.Buildable, most: int):
  """Gives cudnn, where it computes attention, room for so many segments of a row."""
  if most < 1:
    raise UserError(f"MAX_SEGMENTS_PER_ROW={most}: a row has at least 1.")
  for kernel in select(graph, layers.cudnn):
    kernel.max_segments = most


def _mesh(graph: fdl.Buildable) -> MeshSpec:
  """Returns the shape of the mesh that a graph is for; of a model alone, the default one."""
  found: Any = next(select(graph, MeshSpec), fdl.Config(MeshSpec))
  return fdl.build(found)


def _check_kernel(kernel: str, device: Any, sizes: Mapping[str, int]):
  """Finds whether devices, and a mesh of them with these sizes of axes, have what a kernel needs.

  Raises:
    UserError: They have not.
  """
  # By name: whether the device has it, and what does.
  needs = {
    "cudnn": (topology.has_cudnn_attention(device), "NVIDIA GPUs from Ampere on"),
    "splash": (topology.has_splash_attention(device), "TPUs"),
    "tokamax": (topology.has_tokamax_attention(device), "NVIDIA GPUs from Hopper on"),
  }
  has, needed = needs.get(kernel, (True, ""))
  if not has:
    raise UserError(
      f"ATTENTION_KERNEL={kernel} needs {needed}, and this is a {device.device_kind}."
    )
  if kernel in ("ring", "gathered") and sizes["context"] == 1:
    axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    raise UserError(
      f"ATTENTION_KERNEL={kernel} needs a mesh whose axis context is longer than 1, but that of"
      f" ICI_MESH_SHAPE x DCN_MESH_SHAPE is {axes or 'one device'}: give it one, or take auto."
    )


def _best(node: Any, device: Any, shares_time: bool) -> str:
  biased = getattr(node, "relative_bias", None) is not None
  if shares_time and not biased:
    return "ring"
  if topology.has_cudnn_attention(device):
    return "cudnn" if _suits_cudnn(node) else "xla_chunked"
  if topology.has_splash_attention(device):
    return "xla_chunked" if biased else "splash"
  return "xla" if device.platform == "cpu" else "xla_chunked"


def _suits_cudnn(node: Any) -> bool:
  extras = ("soft_cap", "sinks", "extra_logit", "relative_bias")
  dtype = jnp.dtype(getattr(node.query, "dtype", jnp.float32))
  width = node.head_dim + (getattr(node, "rope_dim", None) or 0)
  plain = all(getattr(node, name, None) is None for name in extras)
  return plain and dtype.itemsize == 2 and width <= 256 and width % 8 == 0


def remat(graph: fdl.Buildable, policy: str = "SAVE_NOTHING"):
  """Sets what the backward pass of a block finds saved: a name of `layers.Remat`."""
  if policy not in layers.Remat.__members__:
    hint = did_you_mean(policy, layers.Remat.__members__)
    raise UserError(
      f"no remat policy {policy}.{hint or f' One of {list(layers.Remat.__members__)}.'}"
    )
  for node in select(graph, layers.Stack):
    node.remat = layers.Remat[policy]


def quantize(graph: fdl.Buildable, kind: str = "fp8"):
  """Makes the linear maps and experts of blocks multiply in few bits: fp8, fp8_delayed or int8.

  Of mxfp8 the linear maps only: there are no block-scaled matmuls of experts.
  """
  if kind not in _DOTS:
    hint = did_you_mean(kind, _DOTS) or f" One of {', '.join(_DOTS)}."
    raise UserError(f"no quantization {kind}.{hint}")
  device = topology.devices()[0]
  if kind != "int8" and not topology.has_fp8(device):
    knobs = f"QUANTIZATION={kind} (or USE_FP8)"
    raise UserError(f"{knobs} needs NVIDIA GPUs from Ada on, and this is a {device.device_kind}.")
  if kind == "mxfp8" and not topology.has_mxfp8(device):
    raise UserError(
      f"QUANTIZATION=mxfp8 needs NVIDIA GPUs from Blackwell on, and this is a {device.device_kind}:"
      " take QUANTIZATION=fp8."
    )
  for layer in (layers.Linear, layers.ExpertLinear)[: 1 if kind == "mxfp8" else 2]:
    for node in select(graph, layer, *_BLOCK):
      node.dot = fdl.Partial(_DOTS[kind])


def transformer_engine(graph: fdl.Buildable):
  """Makes the linear maps of blocks multiply by NVIDIA's Transformer Engine, in fp8 if they did.

  Raises:
    UserError: It cannot be loaded, there is not one NVIDIA GPU, or they multiply otherwise.
  """
  devices = topology.devices()
  if not topology.has_transformer_engine(devices[0]):
    needed = "an NVIDIA GPU from Ampere on"
    raise UserError(f"ENABLE_TE needs {needed}, and this is a {devices[0].device_kind}.")
  if len(devices) > 1:
    raise UserError(f"ENABLE_TE is for one GPU, and here are {len(devices)}.")
  layers.transformer_engine.load()
  for node in select(graph, layers.Linear, *_BLOCK):
    dot = getattr(node, "dot", None)
    made = None if dot is None else fdl.get_callable(dot)
    if made not in (None, layers.Fp8, layers.TransformerEngine):
      raise UserError("ENABLE_TE goes with QUANTIZATION=fp8 or none.")
    if made is not layers.TransformerEngine:
      node.dot = fdl.Partial(layers.TransformerEngine, fp8=dot is not None)


def lora(
  graph: fdl.Buildable,
  rank: int = 8,
  alpha: float | None = None,
  dropout: float = 0.0,
  roles: Sequence[str] = LORA_ROLES["all"],
  base: str | None = None,
):
  """Adapts the linear maps of these roles, and trains nothing else; alpha None scales by 1.

  `base` is the scheme by which the linear maps and experts of the blocks are held: int8 or nf4.
  """
  adapter = fdl.Partial(layers.Lora, rank=rank, scale=1.0 if alpha is None else alpha / rank)
  if dropout:
    adapter.dropout = fdl.Partial(layers.Dropout, rate=dropout)
  adapted = list(select(graph, layers.Linear, *roles))
  if not adapted:
    raise UserError(f"no linear map has one of the roles {', '.join(roles)}.")
  for node in adapted:
    node.lora = copy.deepcopy(adapter)
    node.lora.dtype = getattr(node, "dtype", jnp.float32)
  if base is not None:
    if base not in (schemes := ("int8", "nf4")):
      raise UserError(f"no scheme {base} for the base.{did_you_mean(base, schemes)}")
    for node in _matrices(graph):
      node.scheme = getattr(layers.quantization, base)
  for node in select(graph, Trainer):
    node.trained = layers.lora.WEIGHTS


def hold(graph: fdl.Buildable, scheme: str = "int8"):
  """Holds the linear maps and experts of blocks in few bits, to evaluate or decode.

  int8 has a scale for each of their outputs (of each head, where these are summed), int4 and nf4
  one for 128 and 64 numbers. The products are in the compute dtype.
  """
  if scheme not in _SCHEMES:
    hint = did_you_mean(scheme, _SCHEMES) or f" One of {', '.join(_SCHEMES)}."
    raise UserError(f"no scheme {scheme} to hold weights by.{hint}")
  for node in _matrices(graph):
    node.scheme, node.dot = _SCHEMES[scheme], None
  for node in select(graph, Trainer):
    node.read_only = True


def stack(graph: fdl.Buildable, scan: bool = True):
  """Scans over repeated blocks, or unrolls them."""
  for node in select(graph, layers.Stack):
    node.scan = scan
    if not scan:
      node.pipeline = None


def pipeline(graph: fdl.Buildable, stages: fdl.Config[layers.Pipeline]):
  """Spreads repeated blocks over the stages of a pipeline."""
  for node in select(graph, layers.Stack):
    node.scan, node.pipeline = True, stages


def cut_sequences(graph: fdl.Buildable):
  """Cuts what is between attention and feed-forward along time, over the mesh axis tensor too."""
  for kind in (layers.Block, layers.Linear):
    for node in select(graph, kind):
      node.time = "sequence"


def decoding(graph: fdl.Buildable):
  """Fits a model to decode: a scan would copy caches at every token; experts serve all tokens."""
  stack(graph, scan=False)
  for node in select(graph, layers.Moe):
    node.dispatch = layers.dispatch.dropless


def shrink(graph: fdl.Buildable):
  """Makes a model of any family so small that it trains and compiles within seconds on a CPU.

  Its parts and their order stay: windows are shorter than the sequences of 32 tokens, grouped heads
  stay grouped, and the pattern of layers is repeated twice, or once for each group of a pipeline.
  """
  vocab_size, seq_len = 96, 32
  for node in select(graph, layers.Decoder):
    node.vocab_size, node.dim = vocab_size, 32
  for node in select(graph, layers.Stack):
    pipeline = getattr(node, "pipeline", None)
    node.repeats = 2 if pipeline is None else pipeline.stages * pipeline.chunks
    node.prologue = list(node.prologue)[:1]
  for node in select(graph, layers.Attention):
    grouped = node.num_kv_heads is not None and node.num_kv_heads < node.num_heads
    node.num_heads, node.head_dim = 4, 16
    node.num_kv_heads = 2 if grouped else None
    node.window = None if node.window is None else 8
  for node in select(graph, layers.LatentAttention):
    node.num_heads, node.head_dim, node.rope_dim, node.value_dim = 4, 16, 8, 16
    node.rank, node.query_rank = 16, 24
  for node in select(graph, layers.Mlp):
    node.hidden_dim = 48
  for node in select(graph, layers.Moe):
    node.num_experts, node.num_chosen = 4, 2
    if "num_groups" in getattr(node.choice, "__arguments__", {}):
      node.choice.num_groups, node.choice.num_chosen_groups = 2, 1
  for node in select(graph, layers.Experts):
    node.hidden_dim = 24
  for node in select(graph, layers.PositionEmbedding):
    node.max_len = seq_len
  for node in _having(graph, "seq_len"):
    node.seq_len = seq_len
    if getattr(node, "vocab_size", None) is not None:
      node.vocab_size = vocab_size


FIDDLERS = {
  edit.__name__: edit
  for edit in (
    attention,
    cut_sequences,
    decoding,
    hold,
    lora,
    precision,
    quantize,
    remat,
    shrink,
    stack,
    transformer_engine,
  )
}
