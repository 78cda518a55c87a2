# SPDX-License-Identifier: Apache-2.0
import types

import fiddle as fdl
import jax.numpy as jnp
import pytest

from paxlike import fiddlers, layers, registry, topology
from paxlike.errors import UserError


@pytest.fixture
def graph():
  return registry.find("Gpt3_52k")().trainer()


def test_select_finds_by_type_and_role(graph):
  roles = [linear.role for linear in fiddlers.select(graph, layers.Linear)]
  assert sorted(roles) == ["down", "key", "output", "query", "up", "value"]
  chosen = fiddlers.select(graph, layers.Linear, "up", "query")
  assert {linear.role for linear in chosen} == {"up", "query"}


def test_precision_reaches_every_layer_that_computes(graph):
  fiddlers.precision(graph, "float16")
  for kind in (layers.Linear, layers.Embedding, layers.PositionEmbedding, layers.LayerNorm):
    nodes = list(fiddlers.select(graph, kind))
    assert nodes
    assert all(node.dtype == jnp.float16 for node in nodes)


def test_stack_and_remat_change_the_stack(graph):
  fiddlers.stack(graph, scan=True)
  fiddlers.remat(graph, "SAVE_DOT_ONLY")
  assert graph.model.stack.scan is True
  assert graph.model.stack.remat is layers.Remat.SAVE_DOT_ONLY
  with pytest.raises(UserError, match="Did you mean SAVE_NOTHING"):
    fiddlers.remat(graph, "SAVE_NOTHIN")


def kernels_of(name, **knobs):
  return fdl.build(registry.find(name)(**knobs).trainer().model).kernels


def test_attention_is_what_the_device_offers(h200):
  assert kernels_of("Gpt3_52k") == ["cudnn"]
  assert kernels_of("Gpt3_52k", ATTENTION_KERNEL="xla") == ["xla"]
  assert kernels_of("Gpt3_52k", FPROP_DTYPE="float32") == ["xla_chunked"]
  assert kernels_of("Gemma2_2B") == ["xla_chunked"]  # It caps logits.
  assert kernels_of("GptOss20B") == ["xla_chunked"]  # It has sinks.
  assert kernels_of("PileGLaM126M64E") == ["xla_chunked"]  # It adds a bias.
  assert kernels_of("DeepSeekV3") == ["cudnn"]


def test_attention_is_a_ring_where_devices_share_sequences():
  mesh = {"ICI_MESH_SHAPE": {"context": -1}}
  assert kernels_of("Gpt3_52k", **mesh) == ["ring"]
  assert kernels_of("PileGLaM126M64E", **mesh) == ["xla"]  # It adds a bias.
  assert kernels_of("Gpt3_52k", ATTENTION_KERNEL="gathered", **mesh) == ["gathered"]


def test_what_fills_the_mesh_is_counted(h200):
  mesh = {"ICI_MESH_SHAPE": {"context": -1}}
  assert kernels_of("Gpt3_52k", **mesh) == ["cudnn"]
  topology.use("h200-2")
  assert kernels_of("Gpt3_52k", **mesh) == ["ring"]
  assert kernels_of("Gpt3_52k", ICI_MESH_SHAPE={"tensor": 2, "context": -1}) == ["cudnn"]


@pytest.mark.parametrize("kernel", ["ring", "gathered"])
@pytest.mark.parametrize("shape", [(-1, 1, 1), {"data": 8, "context": -1}, {"tensor": 8}], ids=str)
def test_a_kernel_of_shared_sequences_is_refused_where_there_are_none(kernel, shape):
  says = f"ATTENTION_KERNEL={kernel} .*axis context.* ICI_MESH_SHAPE .* (data|tensor) 8"
  with pytest.raises(UserError, match=says):
    kernels_of("Gpt3_52k", ATTENTION_KERNEL=kernel, ICI_MESH_SHAPE=shape)


def test_room_for_segments_is_asked_for_where_it_is_taken(h200):
  for kernel, unread in (("auto", []), ("xla", ["MAX_SEGMENTS_PER_ROW"])):
    experiment = registry.find("Gpt3_52k")(MAX_SEGMENTS_PER_ROW=3, ATTENTION_KERNEL=kernel)
    model = fdl.build(experiment.trainer().model)
    assert model.max_segments == (None if unread else 3)
    assert experiment.unread() == unread


@pytest.mark.parametrize("count", [0, -3])
def test_no_room_for_segments_is_refused(h200, count):
  with pytest.raises(UserError, match=f"MAX_SEGMENTS_PER_ROW={count}: .* at least 1"):
    registry.find("Gpt3_52k")(MAX_SEGMENTS_PER_ROW=count).trainer()


def test_attention_on_a_cpu_is_no_gpus():
  assert kernels_of("Gpt3_52k") == ["xla"]
  with pytest.raises(UserError, match="needs NVIDIA GPUs"):
    kernels_of("Gpt3_52k", ATTENTION_KERNEL="cudnn")


def test_attention_on_a_tpu_is_splash(monkeypatch):
  tpu = types.SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
  monkeypatch.setattr(topology, "devices", lambda: [tpu])
  assert kernels_of("Gpt3_52k") == ["splash"]
  assert kernels_of("Gpt3_52k", FPROP_DTYPE="float32") == ["splash"]
  assert kernels_of("Gemma2_2B") == ["splash"]
  assert kernels_of("GptOss20B") == ["splash"]
  assert kernels_of("DeepSeekV3") == ["splash"]
  assert kernels_of("PileGLaM126M64E") == ["xla_chunked"]  # It adds a bias.
  with pytest.raises(UserError, match="tokamax needs NVIDIA GPUs"):
    kernels_of("Gpt3_52k", ATTENTION_KERNEL="tokamax")


def test_tokamax_is_taken_where_it_is_named(h200):
  assert kernels_of("Gemma2_2B", ATTENTION_KERNEL="tokamax") == ["tokamax"]


@pytest.mark.parametrize(("kernel", "needs"), [("splash", "TPUs"), ("tokamax", "NVIDIA GPUs")])
def test_a_kernel_of_other_devices_is_refused(kernel, needs):
  with pytest.raises(UserError, match=f"ATTENTION_KERNEL={kernel} needs {needs}.*this is a cpu"):
    kernels_of("Gpt3_52k", ATTENTION_KERNEL=kernel)


@pytest.mark.parametrize(
  ("knobs", "dot"),
  [
    ({"USE_FP8": True}, layers.Fp8),
    ({"QUANTIZATION": "fp8"}, layers.Fp8),
    ({"QUANTIZATION": "int8"}, layers.Int8),
    ({"QUANTIZATION": "fp8_delayed", "USE_FP8": True}, layers.DelayedFp8),
  ],
)
def test_products_in_few_bits_are_those_of_the_blocks(knobs, dot):
  graph = registry.find("Mixtral8x7B")(**knobs).trainer()

  def dots(kind):
    nodes = fiddlers.select(graph, kind)
    return {node.role: fdl.get_callable(node.dot) for node in nodes if getattr(node, "dot", None)}

  assert dots(layers.Linear) == dict.fromkeys(("query", "key", "value", "output"), dot)
  assert dots(layers.ExpertLinear) == dict.fromkeys(("gate", "up", "down"), dot)
  assert {"head", "router"} <= {node.role for node in fiddlers.select(graph, layers.Linear)}


@pytest.mark.parametrize(
  "knobs", [{"USE_FP8": True}, {"QUANTIZATION": "fp8"}, {"QUANTIZATION": "fp8_delayed"}]
)
def test_fp8_on_a_gpu_that_has_none_is_refused(knobs):
  topology.use("a100-1")
  try:
    with pytest.raises(UserError, match=r"QUANTIZATION=fp8.*USE_FP8.* this is a NVIDIA A100"):
      registry.find("Gpt3_52k")(**knobs).trainer()
    registry.find("Gpt3_52k")(QUANTIZATION="int8").trainer()
  finally:
    topology.use(None)


def test_a_quantization_that_is_none_or_two_is_said(graph):
  with pytest.raises(UserError, match=r"no quantization fp9\..*Did you mean fp8"):
    fiddlers.quantize(graph, "fp9")
  with pytest.raises(UserError, match="USE_FP8=True, but QUANTIZATION=int8"):
    registry.find("Gpt3_52k")(USE_FP8=True, QUANTIZATION="int8").trainer()


def test_a_kernel_that_is_none_is_said(graph):
  with pytest.raises(UserError, match="Did you mean cudnn"):
    fiddlers.attention(graph, "cudn")
