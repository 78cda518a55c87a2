# SPDX-License-Identifier: Apache-2.0
"""The trainers whose steps are compared: usually shrunk models, on the mesh and on one device."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxlike import fiddlers, layers
from paxlike.checks.check import is_cpu
from paxlike.devices import mesh
from paxlike.devices.mesh import MeshSpec
from paxlike.training import optimizers
from paxlike.training.execution import Execution
from paxlike.training.optimizers import Optimizer
from paxlike.training.trainer import Trainer

Build = Callable[[Any], Trainer]

# For small programs that run once on CPUs, where compilation would take most of the time.
_QUICKLY_COMPILED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# The sizes that `fiddlers.shrink` sets and a mesh axis shards.
_SHARDED = (
  (layers.Decoder, "dim", "fsdp"),
  (layers.Decoder, "vocab_size", "tensor"),
  (layers.Attention, "num_heads", "tensor"),
  (layers.Attention, "num_kv_heads", "tensor"),
  (layers.LatentAttention, "num_heads", "tensor"),
  (layers.GatedDeltaNet, "num_heads", "tensor"),
  (layers.GatedDeltaNet, "num_key_heads", "tensor"),
  (layers.Mlp, "hidden_dim", "tensor"),
  (layers.Experts, "hidden_dim", "tensor"),
  (layers.Moe, "num_experts", "expert"),
)


def trained(
  graph: Any, build: Build, *, full: bool, edit: Callable[[Any], None] = lambda graph: None
) -> Trainer:
  """Returns the trainer of a graph; unless `full`, of a shrunk model with a small batch.

  The learning rate is constant, as a warm-up from 0 would make the first update zero. `edit` is
  applied after shrinking.
  """
  graph = copy.deepcopy(graph)
  if hasattr(graph.optimizer, "learning_rate"):
    graph.optimizer.learning_rate = optimizers.constant(peak=0.01)
  if not full:
    _shrink(graph, build)
  edit(graph)
  trainer = build(graph)
  if full:
    return trainer
  stack: Any = trainer.model.stack
  microbatches = 1 if stack.pipeline is None else stack.pipeline.microbatches
  shards = mesh.batch_shards(trainer.devices) * trainer.accumulation_steps * microbatches
  execution = trainer.execution
  if is_cpu(trainer.devices):
    execution = Execution(compiler_options=_QUICKLY_COMPILED)
  sequences = 2 * shards / trainer.devices.size
  return dataclasses.replace(trainer, percore_batch_size=sequences, execution=execution)


def _shrink(graph: Any, build: Build):
  """Shrinks a model but keeps its dims divisible by the mesh axes that shard the large model."""
  large = [
    (node, name, axis, size)
    for kind, name, axis in _SHARDED
    for node in fiddlers.select(graph, kind)
    if (size := getattr(node, name, None)) is not None
  ]
  fiddlers.shrink(graph)
  fiddlers.without_teacher(graph)
  for kind in (layers.Linear, layers.ExpertLinear):
    for node in fiddlers.select(graph, kind):
      # With the small initial weights of large models, attention hardly depends on its keys.
      node.init = layers.gaussian_fan_in
  axes = build(graph).devices.shape
  if 32 % (shards := 2 * axes["context"] * axes["tensor"]):
    fiddlers.shrink(graph, seq_len=math.lcm(32, shards))
  for node, name, axis, size in large:
    if size % axes[axis] == 0 and (small := getattr(node, name)) is not None:
      setattr(node, name, math.lcm(small, axes[axis]))
  for node in fiddlers.select(graph, layers.Attention):
    if node.num_kv_heads is not None:
      node.num_heads = math.lcm(node.num_heads, 2 * node.num_kv_heads)
  for node in fiddlers.select(graph, layers.GatedDeltaNet):
    node.num_heads = math.lcm(node.num_heads, node.num_key_heads)


def not_sharded(graph: Any, build: Build, small: Trainer) -> list[str]:
  """Returns the dims of weights that the mesh shards in the full model but not in the small one."""
  of_large, of_small = _sharded_dims(build(graph)), _sharded_dims(small)
  lost = {
    f"{dim} over {axis}"
    for name in of_large.keys() & of_small.keys()
    for dim, axis in of_large[name] - of_small[name]
  }
  return sorted(lost)


def _sharded_dims(trainer: Trainer) -> dict[str, set[tuple[str, str]]]:
  """Returns weight name -> the set of (dim, mesh axis) that shard it."""
  sizes = trainer.devices.shape

  def axes_of(spec: Any) -> list[tuple[str, ...]]:
    return mesh.axes_by_dim(mesh.partition(spec.dims, spec.shape, sizes))

  return {
    name: {(dim, axis) for dim, axes in zip(spec.dims, axes_of(spec), strict=True) for axis in axes}
    for name, spec in trainer.definition.weights.items()
  }


def on_one_device(trainer: Trainer, graph: Any, build: Build, *, full: bool) -> Trainer:
  """Returns a trainer of the same model on one device: xla attention, no pipeline.

  A small model is unrolled too. Pipeline microbatches become gradient accumulation, as router
  losses depend on the microbatches. Its optimizer makes no updates.
  """

  def simplify(graph: Any):
    fiddlers.attention(graph, "xla")
    for node in fiddlers.select(graph, layers.Stack):
      node.pipeline = None
    if not full:
      fiddlers.stack(graph, scan=False)

  alone = trained(graph, build, full=full, edit=simplify)
  stack: Any = trainer.model.stack
  parts = 1 if stack.pipeline is None else stack.pipeline.microbatches
  return dataclasses.replace(
    alone,
    percore_batch_size=trainer.batch_size,
    accumulation_steps=parts * alone.accumulation_steps,
    mesh=MeshSpec(ici=(1, 1, 1)),
    optimizer=Optimizer(optax.set_to_zero(), alone.optimizer.learning_rate),
  )


def has_low_precision(trainer: Trainer) -> bool:
  """Returns whether a model computes in anything but float32."""
  definition = trainer.definition
  abstract = {
    n: jax.ShapeDtypeStruct(s.shape, s.stored_dtype) for n, s in definition.weights.items()
  }
  prepared = jax.eval_shape(definition.prepare, abstract)
  if jax.eval_shape(definition.quantize_operands, prepared):
    return True
  return any(x.dtype != jnp.float32 for x in jax.tree.leaves(prepared))


def in_float32(graph: Any) -> Any:
  """Returns a copy of a graph that computes in float32, with kernels that support it."""
  graph = copy.deepcopy(graph)
  fiddlers.precision(graph, "float32")
  for kind in (layers.Linear, layers.ExpertLinear):
    for node in fiddlers.select(graph, kind):
      node.dot = None
  for kind in (layers.Attention, layers.LatentAttention):
    for node in fiddlers.select(graph, kind):
      kernel = getattr(node, "kernel", None)
      made = getattr(kernel, "__fn_or_cls__", kernel)
      if made in (layers.cudnn, layers.tokamax):  # 16-bit kernels.
        fiddlers.attention(graph, "auto")
  return graph
