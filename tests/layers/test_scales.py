# SPDX-License-Identifier: Apache-2.0
"""EMBEDDING_SCALE and RESIDUAL_SCALE: Granite's, in every family, besides other scales."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import tiny_llama
from helpers.hf_families import COMMON
from helpers.hf_models import imported, logits
from helpers.shrunk import ONE_OF_EACH

from paxlike import fiddlers, layers, registry
from paxlike.config import graph_file
from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder
from paxlike.errors import UserError

SIZES: dict[str, Any] = COMMON
SCALES = {"EMBEDDING_SCALE": 12.0, "RESIDUAL_SCALE": 0.22}


@pytest.mark.slow
def test_a_llama_with_scales_is_granite(tmp_path):
  """Granite's other two are arguments of layers: of attention, and of the tied embedding."""
  import torch
  import transformers

  config = transformers.GraniteConfig(
    **SIZES,
    embedding_multiplier=SCALES["EMBEDDING_SCALE"],
    residual_multiplier=SCALES["RESIDUAL_SCALE"],
    attention_multiplier=0.1,
    logits_scaling=8.0,
    tie_word_embeddings=True,
  )
  torch.manual_seed(0)
  theirs = transformers.GraniteForCausalLM(config).eval()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  theirs.save_pretrained(tmp_path / "granite")
  tensors = TensorFolder(tmp_path / "granite")
  llama = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True).to_dict()
  llama |= {"rms_norm_eps": config.rms_norm_eps, "architectures": ["LlamaForCausalLM"]}
  arrays = {name: tensors.read(name) for name in tensors.specs}
  tiny_llama.write(tmp_path / "theirs", arrays, llama)
  ours = tmp_path / "ours"
  assert run(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={ours}"]) == 0
  experiment = registry.load(ours / "experiment.json")
  for name, value in SCALES.items():
    experiment.set(name, value, source="test")
  graph = experiment.trainer()
  for node in fiddlers.select(graph, layers.Attention):
    node.scale = 0.1
  graph.model.embedding.logits_scale = 1 / 8
  (ours / "config.json").write_text(graph_file.dump(graph))
  tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  assert np.abs(expected).max() > 0.1
  np.testing.assert_allclose(logits(*imported(ours), tokens), expected, atol=1e-5)


def scales(graph):
  found = {kind: list(fiddlers.select(graph, kind)) for kind in (layers.Embedding, layers.Block)}
  return (
    [getattr(node, "scale", 1.0) for node in found[layers.Embedding]],
    [getattr(node, "residual_scale", 1.0) for node in found[layers.Block]],
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("kind", ["standard", "completep"])
def test_they_multiply_the_scales_that_a_family_and_a_parametrization_have(name, kind):
  cls = registry.find(name)
  knobs: dict[str, Any] = {}
  if kind == "completep":
    sizes = {"BASE_MODEL_DIMS": cls.MODEL_DIMS // 4, "BASE_NUM_LAYERS": cls.NUM_LAYERS // 2}
    knobs = {"PARAMETRIZATION": kind, **sizes}
  none = dict.fromkeys(SCALES, 1.0)
  before, after = (scales(cls(**knobs, **own).trainer()) for own in (none, SCALES))
  assert before[0] and before[1]
  for old, new, scale in zip(before, after, SCALES.values(), strict=True):
    assert new == pytest.approx([one * scale for one in old])
  if kind == "completep":
    depth = cls.NUM_LAYERS / (cls.NUM_LAYERS // 2)
    assert after[1] == pytest.approx([SCALES["RESIDUAL_SCALE"] / depth] * len(after[1]))
  if name == "Gemma2B" and kind == "standard":
    assert after[0] == pytest.approx([12 * math.sqrt(cls.MODEL_DIMS)])


def test_a_model_with_scales_is_not_exported_as_one_without(tmp_path, capsys):
  tiny_llama.write(tmp_path / "theirs")
  ours = tmp_path / "ours"
  assert run(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={ours}"]) == 0
  experiment = registry.load(ours / "experiment.json")
  experiment.set("RESIDUAL_SCALE", 0.5, source="test")
  (ours / "experiment.json").write_text(registry.dump(experiment))
  (ours / "config.json").write_text(graph_file.dump(experiment.trainer()))
  assert run(["--from=paxlike", f"--path={ours}", f"--to={tmp_path / 'back'}"]) == 2
  assert "has no place for RESIDUAL_SCALE=0.5" in capsys.readouterr().err
  with pytest.raises(UserError, match="EMBEDDING_SCALE"):
    registry.find("Gemma2B")(EMBEDDING_SCALE=0.0)
