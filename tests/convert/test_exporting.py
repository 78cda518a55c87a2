# SPDX-License-Identifier: Apache-2.0
"""What is exported is the model of the run, or nothing."""

import json
import re
from typing import Any

import numpy as np
import pytest

from paxlike import fiddlers, registry
from paxlike.config import building, graph_file
from paxlike.convert import exporting, matching, model_graph, size_checks, streaming
from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder, TensorSpec
from paxlike.experiments.deepseek import DeepSeek
from paxlike.experiments.deepseek_v32 import DeepSeekSparse
from paxlike.experiments.falcon import FalconH1
from paxlike.experiments.gemma import Gemma, Gemma2, Gemma3
from paxlike.experiments.gemma4 import Gemma4
from paxlike.experiments.glm import GlmMoe
from paxlike.experiments.gpt import Gpt
from paxlike.experiments.gpt_oss import GptOss
from paxlike.experiments.granite import Granite4
from paxlike.experiments.llama import Llama
from paxlike.experiments.llama4 import Llama4
from paxlike.experiments.mistral import Mistral, Mixtral
from paxlike.experiments.nemotron import NemotronH
from paxlike.experiments.qwen import Qwen3, Qwen3Moe
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of

SIZES = {
  "VOCAB_SIZE": 96,
  "MAX_SEQ_LEN": 64,
  "NUM_LAYERS": 2,
  "MODEL_DIMS": 32,
  "HIDDEN_DIMS": 48,
  "NUM_HEADS": 4,
}
GROUPED = {"NUM_KV_HEADS": 2, "DIMS_PER_HEAD": 16}
EXPERTS = {**GROUPED, "NUM_EXPERTS": 4, "NUM_EXPERTS_PER_TOKEN": 2}
LATENT = {
  "NUM_DENSE_LAYERS": 1,
  "LATENT_DIMS": 20,
  "QUERY_LATENT_DIMS": 24,
  "NUM_EXPERTS": 8,
  "NUM_EXPERT_GROUPS": 4,
  "NUM_EXPERT_GROUPS_PER_TOKEN": 2,
  "NUM_EXPERTS_PER_TOKEN": 3,
}
MAMBA = {"MAMBA_NUM_HEADS": 8, "MAMBA_DIMS_PER_HEAD": 8, "MAMBA_STATE_DIMS": 6}
FAMILIES = {
  DeepSeek: LATENT,
  DeepSeekSparse: LATENT | {"INDEX_NUM_HEADS": 4, "INDEX_TOP_K": 16},
  FalconH1: GROUPED | MAMBA,
  Gemma: GROUPED,
  Gemma2: GROUPED,
  Gemma3: GROUPED,
  Gemma4: {
    **EXPERTS,
    "NUM_LAYERS": 4,
    "NUM_KV_LAYERS": 2,
    "GLOBAL_EVERY": 2,
    "PER_LAYER_DIMS": 8,
  },
  GlmMoe: {**EXPERTS, "NUM_DENSE_LAYERS": 1},
  Gpt: {},
  GptOss: EXPERTS,
  Granite4: EXPERTS | MAMBA | {"LAYER_TYPES": ("mamba", "attention")},
  Llama: GROUPED,
  Llama4: {**GROUPED, "NUM_EXPERTS": 4, "EXPERT_EVERY": 2},
  Mistral: GROUPED,
  Mixtral: EXPERTS,
  NemotronH: EXPERTS | MAMBA | {"LAYER_TYPES": ("mamba", "moe"), "MAMBA_NUM_GROUPS": 2},
  Qwen3: GROUPED,
  Qwen3Moe: EXPERTS,
}


class Normed(Llama):
  """A model that no knob makes."""

  def attention(self):
    attention = super().attention()
    attention.qk_norm = self.norm()
    return attention


def experiment_of(family, **knobs):
  given = SIZES | FAMILIES.get(family, {}) | {"FPROP_DTYPE": "float32"} | knobs
  return registry.with_data(family, "Synthetic")(**given)


def write(folder, experiment, graph=None):
  """Writes the folder of a run whose weights are 0."""
  graph = experiment.trainer() if graph is None else graph
  fiddlers.stack(graph, scan=False)
  definition = Definition(building.build(graph.model))
  folder.mkdir()
  weights = ((f"params.{n}", np.zeros(w.shape, np.float32)) for n, w in definition.weights.items())
  layout = layout_of(definition.module)
  streaming.write(folder / "checkpoints", weights, dtype=np.dtype("float32"), layout=layout)
  (folder / "config.json").write_text(graph_file.dump(graph))
  (folder / "experiment.json").write_text(registry.dump(experiment))


def export(folder, *flags):
  return run(["--from=paxlike", f"--path={folder}", f"--to={folder.parent / 'out'}", *flags])


def assert_refused(folder, capsys, *said):
  for flags in ((), ("--dry_run",)):
    capsys.readouterr()
    assert export(folder, *flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for text in said:
      assert text in error
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize(
  ("path", "value", "line"),
  [
    ("model.norm.epsilon", "0.5", "model.norm.epsilon = 0.5, not 1e-05"),
    ("model.embedding.scale", "3.0", "model.embedding.scale = 3.0, not 1.0"),
    ("model.stack.pattern[0].attention.window", "3", "attention.window = 3, not None"),
    ("model.stack.pattern[0].attention.rope", "none", "attention.rope = None, not"),
    ("model.head.use_bias", "True", "model.head.use_bias = True, not False"),
    ("model.mtp.norm.epsilon", "0.5", "model.mtp.norm.epsilon = 0.5, not 1e-06"),
  ],
)
def test_a_run_with_an_edited_model_is_refused(tmp_path, capsys, path, value, line):
  is_further = path.startswith("model.mtp")
  experiment = experiment_of(DeepSeek, MTP_NUM_LAYERS=1) if is_further else experiment_of(Llama)
  graph = experiment.trainer()
  graph_file.set_path(graph, path, value)
  write(tmp_path / "run", experiment, graph)
  assert_refused(tmp_path / "run", capsys, line, str(tmp_path / "run" / "config.json"))


def test_edits_that_leave_logits_alone_are_exported(tmp_path):
  experiment = experiment_of(Llama)
  graph = experiment.trainer()
  for path, value in {
    "optimizer.b2": "0.5",
    "model.loss_chunks": "2",
    "model.embedding.dtype": "bfloat16",
    "model.stack.pattern[0].attention.query.init.std": "0.5",
    "num_steps": "7",
  }.items():
    graph_file.set_path(graph, path, value)
  fiddlers.quantize(graph, "int8")
  fiddlers.remat(graph, "SAVE_NOTHING")
  fiddlers.attention(graph, "splash")
  write(tmp_path / "run", experiment, graph)
  assert export(tmp_path / "run") == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_knobs_that_leave_logits_alone_are_exported(tmp_path, family):
  """Of a training run with everything on."""
  knobs = {
    "FPROP_DTYPE": "bfloat16",
    "WEIGHT_DTYPE": "bfloat16",
    "QUANTIZATION": "int8",
    "CHECKPOINT_POLICY": "SAVE_NOTHING",
    "ATTENTION_KERNEL": "splash",
    "SHARD_SEQUENCE_OVER_TENSOR": True,
    "DROPOUT_PROB": 0.5,
    "EMBEDDING_DROPOUT_PROB": 0.5,
    "INIT_STD": 0.5,
    "BALANCE_LOSS_WEIGHT": 0.5,
    "ROUTER_Z_LOSS_WEIGHT": 0.5,
    "ROUTER_BIAS_RATE": 0.5,
    "LEARNING_RATE": 0.5,
  }
  experiment = experiment_of(family, **{k: v for k, v in knobs.items() if k in family.knobs()})
  write(tmp_path / "run", experiment)
  assert export(tmp_path / "run", "--dry_run") == 0


@pytest.mark.slow
def test_every_registered_experiment_has_a_configuration_at_hugging_face():
  classes = [cls for cls in registry.registered().values() if cls.hugging_face() is not None]
  assert len(classes) > 50
  for cls in classes:
    experiment = cls()
    graph: Any = experiment.trainer()
    model = experiment.model()
    experiment.adjust(model)
    experiment.adapt(model)
    assert model_graph.difference(model, graph.model) is None, cls
    exporting._check_config(experiment)


@pytest.mark.parametrize(
  ("family", "knobs", "key", "value"),
  [
    (Gemma2, {"DIMS_PER_HEAD": None}, "query_pre_attn_scalar", 8),
    (Llama, {"NUM_KV_HEADS": None}, "num_key_value_heads", 4),
    (Llama, {"HIDDEN_DIMS": None}, "intermediate_size", 128),
    # Theirs is the width of an expert.
    (Mixtral, {"EXPERT_DIMS": 24}, "intermediate_size", 24),
    (GptOss, {"EXPERT_DIMS": 24}, "intermediate_size", 24),
    (Mixtral, {}, "intermediate_size", 48),
    (Qwen3Moe, {"HIDDEN_DIMS": None}, "moe_intermediate_size", 128),
  ],
)
def test_what_is_derived_is_written(tmp_path, family, knobs, key, value):
  write(tmp_path / "run", experiment_of(family, **knobs))
  assert export(tmp_path / "run") == 0
  assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == value


@pytest.mark.parametrize(
  ("family", "knobs", "said"),
  [
    (Gemma3, {"ATTENTION_SOFT_CAP": 2.0}, "no place for ATTENTION_SOFT_CAP=2.0 (model.stack."),
    (DeepSeek, {"USE_ATTENTION_BIAS": True}, "no place for USE_ATTENTION_BIAS=True"),
    (Mistral, {"USE_ATTENTION_BIAS": True}, "no place for USE_ATTENTION_BIAS=True"),
    (Mixtral, {"USE_ATTENTION_BIAS": True}, "no place for USE_ATTENTION_BIAS=True"),
    (
      Mixtral,
      {"MOE_DISPATCH": "capacity", "CAPACITY_FACTOR": 0.5},
      "no place for MOE_DISPATCH=capacity (model.stack.pattern[0].mlp.dispatch = ",
    ),
    (Gpt, {"DIMS_PER_HEAD": 16}, "no place for DIMS_PER_HEAD=16 (model.stack.pattern[0]."),
    (DeepSeek, {"ROPE_SCALING": "linear"}, "has no such model: rope_type is 'linear'"),
    (Normed, {}, "has no place for"),
  ],
)
def test_what_their_configuration_cannot_say_is_refused(tmp_path, capsys, family, knobs, said):
  write(tmp_path / "run", experiment_of(family, **knobs))
  flags = (f"--fdl_allow_modules={Normed.__module__}",) if family is Normed else ()
  capsys.readouterr()
  assert export(tmp_path / "run", *flags) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  ("knob", "said"),
  [
    ({"NUM_LAYERS": "1"}, "params.stack.layers.1.attention.key.w: only in the checkpoint; "),
    ({"NUM_LAYERS": "3"}, "params.stack.layers.2.attention.key.w: not in the checkpoint; "),
    ({"USE_TIED_EMBEDDING": "True"}, "params.head.w: only in the checkpoint."),
  ],
)
def test_weights_that_are_not_those_of_the_model_are_refused(tmp_path, capsys, knob, said):
  experiment = experiment_of(Llama)
  write(tmp_path / "run", experiment)
  (name,) = knob
  other = experiment.set(name, knob[name], source="test")
  (tmp_path / "run" / "experiment.json").write_text(registry.dump(other))
  (tmp_path / "run" / "config.json").write_text(graph_file.dump(other.trainer()))
  assert_refused(tmp_path / "run", capsys, said)


@pytest.mark.parametrize(
  ("family", "kind", "there"),
  [(Llama, "sequential", 0), (DeepSeek, "parallel", 0), (DeepSeek, "sequential", 1)],
)
def test_layers_for_multi_token_prediction_are_exported_where_theirs_has_some(
  tmp_path, capsys, family, kind, there
):
  experiment = experiment_of(family, MTP_NUM_LAYERS=1, MTP_KIND=kind)
  write(tmp_path / "run", experiment)
  assert export(tmp_path / "run") == 0
  assert ("multi-token prediction are left out" in capsys.readouterr().out) == (not there)
  config = json.loads((tmp_path / "out" / "config.json").read_text())
  assert config.get("num_nextn_predict_layers", 0) == there
  found = [name for name in TensorFolder(tmp_path / "out").specs if ".layers.2." in name]
  assert (
    len([name for name in found if not re.search("self_attn|mlp|layernorm", name)]) == 6 * there
  )


def test_a_model_with_experts_in_some_layers_passes_the_check_of_sizes():
  experiment: Any = registry.find("Nemotron3_Nano_30B_A3B")()
  family, model = experiment.hugging_face(), experiment.model()
  fiddlers.stack(model, scan=False)
  definition = Definition(building.build(model))
  matches = matching.match(definition, family.rules_of, program=family.title)
  found = {
    name: TensorSpec(shape, np.dtype("float32"))
    for match in matches
    for name, shape in zip(match.theirs, match.rule.their_shapes(match.shape), strict=True)
  }
  config = exporting.config_of(experiment, dtype="float32")
  size_checks.check(family.read(config), family, found)
