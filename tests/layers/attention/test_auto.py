# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes attention: chosen when a trainer meets its devices, not before."""

import functools
import types

import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest

from paxlike import fiddlers, layers, registry
from paxlike.devices import topology
from paxlike.errors import UserError
from paxlike.layers import cudnn
from paxlike.layers.attention import auto as auto_attention
from paxlike.layers.attention.auto import Place
from paxlike.layers.attention.kernels import Requirements
from paxlike.layers.decoder import forward
from paxlike.training import preflight

TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")


def trainer(name, **knobs):
  return fdl.build(registry.find(name)(**knobs).trainer())


def kernels_of(name, **knobs):
  made = trainer(name, **knobs)
  preflight.check_setup(made, training=True)
  return made.attention


def test_on_a_gpu_it_is_cudnn_where_it_can(h200):
  assert kernels_of("Gpt3_52k") == ["cudnn"]
  assert kernels_of("Gpt3_52k", ATTENTION_KERNEL="xla") == ["xla"]
  assert kernels_of("Gpt3_52k", FPROP_DTYPE="float32") == ["xla_chunked"]
  for name in ("Gemma2_2B", "GptOss20B", "PileGLaM126M64E"):  # Soft cap, sinks, bias.
    assert trainer(name).model.kernels(Place(topology.devices()[0])) == ["xla_chunked"]
  assert trainer("DeepSeekV3").model.kernels(Place(topology.devices()[0])) == ["cudnn"]


@pytest.mark.parametrize(
  ("capability", "knobs", "is_packed", "name"),
  [
    ("8.0", {}, False, "cudnn"),
    ("8.0", {}, True, "xla_chunked"),
    ("8.0", {"DIMS_PER_HEAD": 136}, False, "xla_chunked"),
    ("9.0", {"DIMS_PER_HEAD": 136}, True, "cudnn"),
    ("10.0", {"DIMS_PER_HEAD": 136}, True, "cudnn"),
    ("9.0", {"DIMS_PER_HEAD": 264}, False, "xla_chunked"),
    ("9.0", {"DIMS_PER_HEAD": 60}, False, "xla_chunked"),
    ("7.5", {}, False, "xla_chunked"),
  ],
)
def test_what_cudnn_lacks_on_a_gpu_another_kernel_does(capability, knobs, is_packed, name):
  """As `check_is_flash_attention` of jax/_src/cudnn/fused_attention_stablehlo.py has it."""
  gpu = types.SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=capability)
  assert trainer("Gpt3_52k", **knobs).model.kernels(Place(gpu), is_packed=is_packed) == [name]


@pytest.mark.parametrize(
  ("width", "value_width", "name"),
  [(192, 128, "cudnn"), (96, 128, "xla_chunked"), (128, 60, "xla_chunked")],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_cudnn_has_values_that_are_narrower_than_keys(h200, width, value_width, name, is_packed):
  requirements = Requirements(jnp.bfloat16, 4, 4, width, value_width, is_packed, ())
  assert auto_attention.best(requirements, Place(topology.devices()[0])).__name__ == name
  if name != "cudnn":
    q, v = (jax.ShapeDtypeStruct((2, 8, 4, H), "bfloat16") for H in (width, value_width))
    with pytest.raises(UserError, match=f"heads of {width} with values of {value_width}; "):
      jax.eval_shape(functools.partial(cudnn, scale=1.0, segments_BT=None), q, q, v)


def test_keys_that_are_repeated_are_told_of(h200, monkeypatch):
  gpu = topology.devices()[0]
  for counts, says in ((True, "cudnn"), (False, "cudnn (KV heads repeated")):
    monkeypatch.setattr(auto_attention, "COUNTS_KEY_HEADS", counts)
    model = trainer("Llama3_8B").model
    assert model.kernels(Place(gpu)) == ["cudnn"]
    (told,) = model.kernels(Place(gpu), is_packed=True)
    assert told.startswith(says) and (told == "cudnn") is counts
    assert trainer("Gpt3_52k").model.kernels(Place(gpu), is_packed=True) == ["cudnn"]


def test_it_is_a_ring_where_devices_share_sequences():
  mesh = {"ICI_MESH_SHAPE": {"context": -1}}
  assert kernels_of("Gpt3_52k", **mesh) == ["ring"]
  assert trainer("PileGLaM126M64E").model.kernels(Place(jax.devices()[0], 8)) == ["xla"]
  assert kernels_of("Gpt3_52k", ATTENTION_KERNEL="gathered", **mesh) == ["gathered"]


def test_what_fills_the_mesh_is_counted(h200):
  mesh = {"ICI_MESH_SHAPE": {"context": -1}}
  assert kernels_of("Gpt3_52k", **mesh) == ["cudnn"]
  with topology.target("h200-2"):
    assert kernels_of("Gpt3_52k", **mesh) == ["ring"]
    assert kernels_of("Gpt3_52k", ICI_MESH_SHAPE={"tensor": 2, "context": -1}) == ["cudnn"]


@pytest.mark.parametrize("kernel", ["ring", "gathered"])
@pytest.mark.parametrize("shape", [(-1, 1, 1), {"data": 8, "context": -1}, {"tensor": 8}], ids=str)
def test_a_kernel_of_shared_sequences_is_refused_where_there_are_none(kernel, shape):
  says = f"ATTENTION_KERNEL={kernel} .*axis context.* ICI_MESH_SHAPE .* (data|tensor) 8"
  with pytest.raises(UserError, match=says):
    kernels_of("Gpt3_52k", ATTENTION_KERNEL=kernel, ICI_MESH_SHAPE=shape)


@pytest.mark.parametrize(("kernel", "limit"), [("auto", 3), ("cudnn", 3), ("xla", None)])
def test_segments_are_limited_where_cudnn_has_room_for_so_many(h200, kernel, limit):
  experiment = registry.find("Gpt3_52k")(MAX_SEGMENTS_PER_ROW=3, ATTENTION_KERNEL=kernel)
  model = fdl.build(experiment.trainer().model)
  assert model.max_segments(Place(topology.devices()[0])) == limit
  assert experiment.unread() == ([] if limit else ["MAX_SEGMENTS_PER_ROW"])
  if kernel == "auto":
    assert model.max_segments(Place(TPU)) is None


def test_a_kernel_that_is_named_keeps_the_room_for_segments(h200):
  """Also one that a graph names without: kernels of users, and saved ones."""
  graph = registry.find("Gpt3_52k")(MAX_SEGMENTS_PER_ROW=200).trainer()
  for kernel, limit in (("cudnn", 200), ("auto", 200), ("xla", None), ("auto", 64)):
    fiddlers.attention(graph, kernel)  # pyright: ignore[reportArgumentType]
    assert fdl.build(graph).model.max_segments(Place(topology.devices()[0])) == limit
  for kernel in (cudnn, auto_attention.auto, functools.partial(cudnn)):
    for node in fiddlers.select(graph, layers.Attention):
      node.kernel = kernel
    assert fdl.build(graph).model.max_segments(Place(topology.devices()[0])) == 64


@pytest.mark.parametrize("count", [0, -3])
def test_no_room_for_segments_is_refused(count):
  with pytest.raises(UserError, match=f"MAX_SEGMENTS_PER_ROW={count}: .* at least 1"):
    registry.find("Gpt3_52k")(MAX_SEGMENTS_PER_ROW=count).trainer()


def test_where_no_sequences_are_shared_a_saved_ring_is_told_as_what_it_is():
  model = trainer("Gpt3_52k", ATTENTION_KERNEL="ring").model
  assert model.kernels(Place(jax.devices()[0], 4)) == ["ring"]
  assert model.kernels(Place(jax.devices()[0])) == ["xla_chunked"]


def test_on_a_tpu_it_is_splash_where_it_can():
  for name in ("Gpt3_52k", "Gemma2_2B", "GptOss20B", "DeepSeekV3"):
    assert trainer(name, FPROP_DTYPE="float32").model.kernels(Place(TPU)) == ["splash"]
  assert trainer("PileGLaM126M64E").model.kernels(Place(TPU)) == ["xla_chunked"]  # It adds a bias.


def test_tokamax_is_taken_where_it_is_named(h200):
  assert trainer("Gemma2_2B", ATTENTION_KERNEL="tokamax").attention == ["tokamax"]


@pytest.fixture
def target(request):
  """Programs are made for these devices, which are not there."""
  with topology.target(request.param):
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("target", ["h200-1", "a100-1", "v5e-1", None], indirect=True)
@pytest.mark.parametrize("name", ["Llama31_8B", "Gemma3_1B", "GptOss20B", "DeepSeekV3"])
def test_the_kernels_that_are_told_are_those_that_are_traced(monkeypatch, name):
  graph = registry.find(name)().trainer()
  fiddlers.shrink(graph)
  made = fdl.build(graph)
  definition = made.definition
  taken, best = [], auto_attention.best

  def record(requirements, place):
    taken.append((best(requirements, place), requirements))
    return auto_attention.xla  # Which traces anywhere.

  monkeypatch.setattr(auto_attention, "best", record)
  params = {
    name: jax.ShapeDtypeStruct(spec.shape, "float32") for name, spec in definition.weights.items()
  }
  tokens = jax.ShapeDtypeStruct((2, 32), "int32")
  batch = {"inputs": tokens, "segments": tokens, "positions": tokens}
  jax.eval_shape(lambda p, b: forward(definition, definition.prepare(p), b), params, batch)
  monkeypatch.undo()
  told = made.model.kernels(Place(topology.devices()[0]), is_packed=True)
  assert told == sorted({auto_attention.described(*one) for one in taken})
