# SPDX-License-Identifier: Apache-2.0
"""Fiddlers: functions that edit a whole graph; they find nodes by type and role, never by path.

Each takes the root graph and edits it in place; `--fiddler=precision(dtype="float32")` applies one
from the command line. Experiments apply them in a fixed order: qk_norm, multi_token_prediction,
qk_clip, loss, parametrize, rescale, precision, quantize, transformer_engine, lora, attention,
segments, remat, shard_sequences, stack, pipeline.
"""

import copy
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
from fiddle import daglish, selectors

from paxlike import layers
from paxlike.config import building, ranges
from paxlike.errors import UserError, did_you_mean
from paxlike.training import optimizers
from paxlike.training.trainer import Trainer

_ATTENTION = ("query", "key", "value", "output", "query_down", "latent", "key_value")
_MLP = ("up", "gate", "down")
_BLOCK = _ATTENTION + _MLP
_DOTS = {
  "fp8": layers.Fp8,
  "fp8_delayed": layers.DelayedFp8,
  "mxfp8": layers.MxFp8,
  "int8": layers.Int8,
}
# Schemes of `quantize_weights`. In the base of `lora`, int8 has a scale per block of 64 instead.
_SCHEMES = {
  "int8": layers.weight_only.int8_columns,
  "int4": layers.weight_only.int4,
  "nf4": layers.weight_only.nf4,
}
# Values of LORA_TARGET_LAYERS.
LORA_ROLES = {"all": _BLOCK, "attention": _ATTENTION, "mlp": _MLP}


def select(graph: fdl.Buildable, kind: Callable[..., Any], *roles: str) -> Iterator[Any]:
  """Yields every node of `graph` that builds a `kind`, with one of `roles` if any are given.

  If `kind` is a function, yields the nodes that call it.
  """
  for node in selectors.select(graph, kind, check_nonempty=False):
    if not roles or getattr(node, "role", None) in roles:
      yield node


def _matrices(graph: fdl.Buildable) -> Iterator[Any]:
  """Yields the linear maps and experts of the blocks of `graph`."""
  for kind in (layers.Linear, layers.ExpertLinear):
    yield from select(graph, kind, *_BLOCK)


def _having(graph: fdl.Buildable, argument: str) -> Iterator[Any]:
  """Yields every node of `graph` that sets `argument`."""
  for node, _ in daglish.iterate(graph):
    if isinstance(node, fdl.Buildable) and argument in node.__arguments__:
      yield node


def precision(graph: fdl.Buildable, dtype: ranges.ComputeDtype = "bfloat16"):
  """Sets the compute dtype of all layers but routers; weights, statistics and loss stay float32."""
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


def attention(graph: fdl.Buildable, kernel: layers.KernelName = "auto"):
  """Sets the attention kernel; `auto` depends on the devices."""
  if kernel not in layers.KERNELS:
    hint = did_you_mean(kernel, layers.KERNELS) or f" One of {', '.join(layers.KERNELS)}."
    raise UserError(f"no attention kernel {kernel}.{hint}")
  entry = layers.KERNELS[kernel]
  for kind in (layers.Attention, layers.LatentAttention):
    for node in select(graph, kind):
      most = getattr(getattr(node, "kernel", None), "max_segments", None)
      node.kernel = fdl.Partial(entry.function) if entry.limits_segments else entry.function
      if most is not None and entry.limits_segments:
        node.kernel.max_segments = most


def segments(graph: fdl.Buildable, most: ranges.Size):
  """Sets the maximum number of segments per sequence of cuDNN attention."""
  if most < 1:
    raise UserError(f"MAX_SEGMENTS_PER_ROW={most}: a sequence has at least 1.")
  for entry in layers.KERNELS.values():
    for kernel in select(graph, entry.function) if entry.limits_segments else ():
      kernel.max_segments = most


def remat(graph: fdl.Buildable, policy: str = "SAVE_NOTHING"):
  """Sets the remat policy of blocks, a name in `layers.Remat`."""
  if policy not in layers.Remat.__members__:
    hint = did_you_mean(policy, layers.Remat.__members__)
    raise UserError(
      f"no remat policy {policy}.{hint or f' One of {list(layers.Remat.__members__)}.'}"
    )
  for kind in (layers.Stack, layers.SequentialMtp, layers.ParallelMtp):
    for node in select(graph, kind):
      node.remat = layers.Remat[policy]


def quantize(graph: fdl.Buildable, kind: str = "fp8"):
  """Runs the matmuls of the blocks' linear maps and experts in 8 bits; `kind` is a key of `_DOTS`.

  mxfp8 applies to linear maps only, because there is no block-scaled grouped matmul for experts.
  """
  if kind not in _DOTS:
    hint = did_you_mean(kind, _DOTS) or f" One of {', '.join(_DOTS)}."
    raise UserError(f"no quantization {kind}.{hint}")
  for node in select(graph, layers.Linear, *_BLOCK) if kind == "mxfp8" else _matrices(graph):
    node.dot = fdl.Partial(_DOTS[kind])


def transformer_engine(graph: fdl.Buildable):
  """Uses NVIDIA's Transformer Engine for the linear maps of blocks, in fp8 if they use fp8.

  Raises:
    UserError: They use another quantization.
  """
  for node in select(graph, layers.Linear, *_BLOCK):
    dot = getattr(node, "dot", None)
    made = None if dot is None else fdl.get_callable(dot)
    if made not in (None, layers.Fp8, layers.TransformerEngine):
      raise UserError("ENABLE_TE (transformer_engine) requires QUANTIZATION=fp8 or none.")
    if made is not layers.TransformerEngine:
      node.dot = fdl.Partial(layers.TransformerEngine, fp8=dot is not None)


def lora(
  graph: fdl.Buildable,
  rank: ranges.Size = 8,
  alpha: ranges.Factor | None = None,
  dropout: ranges.Probability = 0.0,
  roles: Sequence[str] = LORA_ROLES["all"],
  base: str | None = None,
):
  """Adds LoRA to the linear maps of these roles, and freezes all other weights.

  The adapters' scale is alpha / rank, or 1 if alpha is None.
  `base`, int8 or nf4, is the weight-only quantization of the blocks' linear maps and experts.
  """
  adapter = fdl.Partial(layers.Lora, rank=rank, scale=1.0 if alpha is None else alpha / rank)
  if dropout:
    adapter.dropout = fdl.Partial(layers.Dropout, rate=dropout)
  if not roles:
    raise UserError("roles: expected at least one role of linear maps.")
  adapted = list(select(graph, layers.Linear, *roles))
  linears = select(graph, layers.Linear)
  there: set[str] = {role for node in linears if (role := getattr(node, "role", None))}
  absent = [role for role in roles if role not in there]
  # A key of LORA_ROLES may include roles that this model does not have.
  if absent and (not adapted or tuple(roles) not in map(tuple, LORA_ROLES.values())):
    raise UserError(
      f"LORA_TARGET_LAYERS (roles): no linear map has the role {' or '.join(map(repr, absent))};"
      f" expected {', '.join(LORA_ROLES)}, or some of {', '.join(sorted(there))}."
    )
  for node in adapted:
    node.lora = copy.deepcopy(adapter)
    node.lora.dtype = getattr(node, "dtype", jnp.float32)
  if base is not None:
    if base not in (schemes := ("int8", "nf4")):
      raise UserError(f"no scheme {base} for the base.{did_you_mean(base, schemes)}")
    for node in _matrices(graph):
      node.scheme = getattr(layers.weight_only, base)
  for node in select(graph, Trainer):
    node.trained = layers.lora.WEIGHTS


def quantize_weights(graph: fdl.Buildable, scheme: str = "int8"):
  """Weight-only quantization of the blocks' linear maps and experts, to evaluate or decode.

  int8 has one scale per output (per head and output in a map that contracts heads); int4 has one
  per 128 weights, nf4 one per 64. Matmuls are in the compute dtype.
  """
  if scheme not in _SCHEMES:
    hint = did_you_mean(scheme, _SCHEMES) or f" One of {', '.join(_SCHEMES)}."
    raise UserError(f"no weight-only quantization {scheme}.{hint}")
  for node in _matrices(graph):
    node.scheme, node.dot = _SCHEMES[scheme], None
  for node in select(graph, Trainer):
    node.read_only = True


def stack(graph: fdl.Buildable, scan: bool | None = True):
  """Scans over repeated blocks, or unrolls them; None: chosen by the number of devices."""
  for node in select(graph, layers.Stack):
    node.scan = scan
    if scan is False:
      node.pipeline = None


def pipeline(graph: fdl.Buildable, stages: fdl.Config[layers.Pipeline]):
  """Splits repeated blocks into the stages of a pipeline."""
  for node in select(graph, layers.Stack):
    node.scan, node.pipeline = True, stages


def shard_sequences(graph: fdl.Buildable):
  """Sequence parallelism: shards norms and residuals along time over axis tensor."""
  for kind in (layers.Block, layers.Linear):
    for node in select(graph, kind):
      node.time = "sequence"


def qk_norm(graph: fdl.Buildable):
  """Adds RMSNorm of queries and keys (Dehghani et al., 2023, arXiv:2302.05442) where none is.

  Raises:
    UserError: The model's attention has no such norm, as latent attention.
  """
  if any(select(graph, layers.LatentAttention)):
    raise UserError("QK_NORM: latent attention has norms of its own.")
  for node in select(graph, layers.Attention):
    if getattr(node, "qk_norm", None) is None:
      node.qk_norm = fdl.Partial(layers.RmsNorm)


def qk_clip(graph: fdl.Buildable, threshold: ranges.PositiveFloat = 100.0):
  """Adds QK-clip to all attention layers; see `layers.QkClip`.

  Raises:
    UserError: Queries and keys are normalized, so that the scales of their weights have no effect.
  """
  for node in (*select(graph, layers.Attention), *select(graph, layers.LatentAttention)):
    if getattr(node, "qk_norm", None) is not None:
      raise UserError(
        "QK_CLIP: this model normalizes queries and keys, so scaling their weights has no effect:"
        " leave it out."
      )
    node.qk_clip = fdl.Partial(layers.QkClip, threshold=threshold)


def multi_token_prediction(
  graph: fdl.Buildable,
  num_layers: ranges.Depth = 1,
  kind: layers.MtpKind = "sequential",
  loss_weight: ranges.Weight = 0.1,
):
  """Adds layers that predict the `num_layers` tokens after the next one, in training.

  Their blocks are like the last one of the pattern of layers, and their norms like the last norm.
  """
  if kind not in (kinds := typing.get_args(layers.MtpKind)):
    raise UserError(f"MTP_KIND: no kind {kind}.{did_you_mean(kind, kinds)}")
  for node in select(graph, layers.Decoder):
    block = copy.deepcopy(node.stack.pattern[-1])
    options = {"num_layers": num_layers, "block": block, "loss_weight": loss_weight}
    options["remat"] = getattr(node.stack, "remat", layers.Remat.SAVE_EVERYTHING)
    if kind == "parallel":
      node.mtp = fdl.Partial(layers.ParallelMtp, **options)
      continue
    like = next(select(block, layers.Linear))
    projection = fdl.Partial(layers.Linear, role=layers.multi_token.ROLE, dtype=like.dtype)
    projection.init = copy.deepcopy(like.init)
    norm = copy.deepcopy(node.norm)
    node.mtp = fdl.Partial(layers.SequentialMtp, norm=norm, projection=projection, **options)


def next_token_only(graph: fdl.Buildable):
  """Removes the layers for multi-token prediction, which only training uses."""
  for node in select(graph, layers.Decoder):
    if getattr(node, "mtp", None) is not None:
      node.mtp = None


def loss(
  graph: fdl.Buildable,
  z_loss: ranges.NonNegativeFloat = 0.0,
  label_smoothing: ranges.Smoothing = 0.0,
):
  """Adds a z-loss to the training loss, and smooths its targets; see `cross_entropy`."""
  for node in select(graph, layers.Decoder):
    node.z_loss, node.label_smoothing = z_loss, label_smoothing


def rescale(graph: fdl.Buildable, embedding: ranges.Factor = 1.0, residual: ranges.Factor = 1.0):
  """Multiplies the scales of the embedded tokens and of the outputs of attention and MLP.

  Applied after `parametrize`, whose factors stay: these are the same for the base model.

  Raises:
    UserError: The model normalizes its embeddings, so that their scale has no effect.
  """
  for node in select(graph, layers.Decoder):
    if embedding != 1 and getattr(node, "embedding_norm", None) is not None:
      raise UserError(
        "EMBEDDING_SCALE: this model normalizes its embeddings, so their scale has no effect."
      )
  for node in select(graph, layers.Embedding):
    node.scale = getattr(node, "scale", 1.0) * embedding
  for node in select(graph, layers.Block):
    node.residual_scale = getattr(node, "residual_scale", 1.0) * residual


def parametrize(
  graph: fdl.Buildable,
  base_dim: ranges.Size | None = None,
  base_layers: ranges.Depth | None = None,
  base_head_dim: ranges.Size | None = None,
):
  """Makes the hyperparameters those of a base model: muP and, with `base_layers`, CompleteP.

  `optimizers.Parametrization` has the sources, and scales learning rates; initial weights and the
  forward pass are scaled here.

  Args:
    graph: The graph.
    base_dim: D of the base model; None: that of this one.
    base_layers: Its number of layers, whose residual branches are added as they are; None: that of
      this one.
    base_head_dim: H of the base model; None: that of this one.

  All widths are assumed to grow with D: those of MLPs and experts, and the numbers of heads.

  Raises:
    UserError: The optimizer, or the width of the heads of latent attention, cannot be scaled.
  """
  (decoder,) = select(graph, layers.Decoder)
  stack = decoder.stack
  ends = len(getattr(stack, "prologue", ())) + len(getattr(stack, "epilogue", ()))
  num_layers = ends + len(stack.pattern) * stack.repeats
  width, depth = decoder.dim / (base_dim or decoder.dim), num_layers / (base_layers or num_layers)
  for node in (*select(graph, layers.Linear), *select(graph, layers.ExpertLinear)):
    if _called(node.init) is not layers.zeros:
      node.init = _for_width(node.init, width, to_width=node.role not in ("head", "router"))
  for node in select(graph, layers.Embedding):
    # Scales that families set follow from the width: its root, and for logits 1 over its root.
    if (given := getattr(node, "scale", 1.0)) != 1:
      node.scale = given / width**0.5
    if getattr(decoder, "head", None) is None:
      given = getattr(node, "logits_scale", 1.0)
      node.logits_scale = given / (width if given == 1 else width**0.5)
  for node in select(graph, layers.Block):
    node.residual_scale = getattr(node, "residual_scale", 1.0) / depth
  for node in select(graph, layers.Attention):
    head = node.head_dim / (base_head_dim or node.head_dim)
    if head != 1:
      given = getattr(node, "scale", None)
      node.scale = node.head_dim**-0.5 * head**-0.5 if given is None else given / head
  if base_head_dim is not None and any(select(graph, layers.LatentAttention)):
    raise UserError("BASE_DIMS_PER_HEAD: the heads of latent attention cannot be scaled.")
  rules = [*select(graph, optimizers.adamw), *select(graph, optimizers.descent)]
  if not rules and getattr(graph, "optimizer", None) is not None:
    raise UserError("PARAMETRIZATION cannot scale the learning rates of this OPTIMIZER.")
  for node in rules:
    rule = _growth(getattr(node, "rule", None))
    node.parametrization = fdl.Config(
      optimizers.Parametrization, width=width, depth=depth, rule=rule
    )


def change_rate(graph: fdl.Buildable, change: Callable[[optimizers.Schedule], Any]):
  """Replaces the learning-rate schedule of the optimizer by what `change` makes of it."""
  for node in list(_having(graph.optimizer, "learning_rate")):
    node.learning_rate = change(building.build(node.learning_rate))


def _for_width(init: Any, width: float, *, to_width: bool) -> Any:
  """Returns the initializer of a matrix whose inputs are wider than in the base model.

  Args:
    init: That of the base model.
    width: How much wider the inputs are.
    to_width: Whether the outputs are wider, too.
  """
  power = 0.5 if to_width else 1.0
  if _called(init) is layers.gaussian_fan_in:  # It shrinks by the root of the width.
    power -= 0.5
  return fdl.Partial(layers.scaled, init=init, by=width**-power) if power else init


def _called(value: Any) -> Any:
  """Returns the function of a node, or the value itself."""
  return fdl.get_callable(value) if isinstance(value, fdl.Buildable) else value


def _growth(rule: Any) -> str:
  """Returns how the steps of a rule grow with the width; see `optimizers.Parametrization`."""
  if _called(rule) is not optimizers.muon:
    return "elementwise"
  return "orthogonal" if getattr(rule, "scale", "rms") == "width" else "orthogonal_rms"


def decoding(graph: fdl.Buildable):
  """Prepares a model for decoding: unrolls layers, and makes MoE dispatch dropless.

  A scan over layers would copy the KV caches for every token. Layers for multi-token prediction are
  removed.
  """
  next_token_only(graph)
  stack(graph, scan=False)
  for node in select(graph, layers.Moe):
    node.dispatch = layers.dispatch.dropless


def shrink(graph: fdl.Buildable, seq_len: ranges.Size = 32):
  """Shrinks a model of any family so that it compiles and trains within seconds on a CPU.

  The structure stays: windows are shorter than `seq_len`, grouped heads stay grouped, and the
  layer pattern is repeated twice, or once per pipeline chunk.
  """
  vocab_size = 96
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
    shard_sequences,
    decoding,
    quantize_weights,
    lora,
    loss,
    multi_token_prediction,
    parametrize,
    precision,
    qk_clip,
    qk_norm,
    quantize,
    remat,
    rescale,
    shrink,
    stack,
    transformer_engine,
  )
}
