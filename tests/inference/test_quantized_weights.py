# SPDX-License-Identifier: Apache-2.0
"""Evaluating and decoding with weights in few bits."""

import json
import math
from typing import Any, cast

import fiddle as fdl
import jax
import numpy as np
import pytest
from helpers.program import run

from paxlike import fiddlers, registry
from paxlike.devices import program_cache, xla_flags
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.inference import generate
from paxlike.layers.precision.weight_only import Quantized
from paxlike.training import train_state


@pytest.mark.slow
def test_few_bits_evaluate_and_decode_nearly_as_whole_weights_do(tmp_path, capsys):
  path = tmp_path / "text.txt"
  path.write_text("how much wood would a woodchuck chuck " * 200)
  flags = (
    "--fdl_config=NanoGptChar",
    f"--fdl.DATA_PATH={path}",
    *("--fdl.NUM_LAYERS=2", "--fdl.MODEL_DIMS=64", "--fdl.PERCORE_BATCH_SIZE=1"),
    *("--fdl.MAX_STEPS=20", "--fdl.LR_COS_WARMUP=2", "--fdl.LEARNING_RATE=3e-3"),
  )
  folder = f"--job_log_dir={tmp_path / 'run'}"
  assert run(*flags, folder) == 0
  result = tmp_path / "run" / "eval_out" / "validation" / "eval_00000020.json"
  whole = json.loads(result.read_text())["log_pplx"]
  for scheme, off in (("int8", 1e-3), ("int4", 0.02), ("nf4", 0.02)):
    quantize = f"--fiddler=quantize_weights(scheme={scheme})"
    assert run(folder, "--mode=eval", quantize) == 0
    assert 0 < abs(json.loads(result.read_text())["log_pplx"] - whole) < off
    capsys.readouterr()
    assert run(folder, "--mode=decode", "--prompt=how", "--max_new_tokens=6", quantize) == 0
    out = capsys.readouterr().out
    assert out.startswith("attention of prompts: flash_cpu\ncomputes in float32\nhow")
    assert run(*flags, f"--job_log_dir={tmp_path / 'other'}", quantize) == 2
    assert "cannot be trained" in capsys.readouterr().err
  assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["SyntheticLLaMA70B", "Mixtral8x7B"])
def test_all_linear_maps_and_experts_of_blocks_are_held(name):
  graph = registry.find(name)(USE_FP8=True).trainer()
  fiddlers.shrink(graph)
  fiddlers.quantize_weights(graph, "int4")
  definition = fdl.build(graph).definition
  weights = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in definition.weights.items()}
  assert not jax.eval_shape(definition.quantize_operands, weights)
  for weight, spec in definition.weights.items():
    held = jax.eval_shape(spec.stored, jax.ShapeDtypeStruct(spec.shape, spec.dtype))
    is_matrix = weight.startswith("stack.") and weight.endswith(".w") and "router" not in weight
    assert isinstance(held, Quantized) == is_matrix, weight


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepSeekV3", "Mixtral8x7B"])
def test_what_is_held_decodes_as_what_is_made_of_it(name):
  graph = registry.find(name)().trainer()
  fiddlers.shrink(graph)
  fiddlers.precision(graph, "float32")
  fiddlers.decoding(graph)
  whole = fdl.build(graph).definition
  fiddlers.quantize_weights(graph)
  definition = fdl.build(graph).definition
  devices = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  drawn = train_state.init_params(whole, devices, seed=1)
  held = {key: definition.weights[key].stored(w) for key, w in drawn.items()}
  made = {
    key: w.dequantized("float32") if isinstance(w, Quantized) else w for key, w in held.items()
  }
  prompts = [np.arange(1, 6), np.arange(20, 29)]
  texts, expected = (
    generate.generate(model, params, prompts, max_new_tokens=8)
    for model, params in ((definition, held), (whole, made))
  )
  for text, other in zip(texts, expected, strict=True):
    assert text.tokens == other.tokens
    np.testing.assert_allclose(text.log_probabilities, other.log_probabilities, rtol=1e-3)


@pytest.mark.slow
def test_a_prompt_never_needs_the_weights_of_all_layers_at_once(monkeypatch):
  graph = registry.find("SyntheticLLaMA7B")(
    NUM_LAYERS=8, MODEL_DIMS=256, HIDDEN_DIMS=512, NUM_HEADS=2, VOCAB_SIZE=64
  ).trainer()
  fiddlers.decoding(graph)
  fiddlers.quantize_weights(graph)
  definition = fdl.build(graph).definition
  devices = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(definition, devices, seed=0)
  programs, compiled = [], jax.stages.Lowered.compile

  def record(lowered: jax.stages.Lowered, **options: Any):
    with program_cache.usable(jax.devices()[0], to_save=True):
      programs.append(compiled(lowered, **options))
    return programs[-1]

  def temporary_bytes() -> int:
    programs.clear()
    generate.generate(definition, params, [np.arange(1, 10)], max_new_tokens=1)
    (program,) = (one for one in programs if "jit__prefill" in (one.as_text() or ""))
    return cast(Any, program.memory_analysis()).temp_size_in_bytes

  monkeypatch.setattr(jax.stages.Lowered, "compile", record)
  matrices = [spec for spec in definition.weights.values() if spec.matmul]
  converted = sum(math.prod(one.shape) * 2 for one in matrices)  # In bfloat16.
  assert 0 < temporary_bytes() < converted / 4
  monkeypatch.setattr(xla_flags, "PREFILL_ON_CPU", {})
  assert temporary_bytes() > converted / 2


def test_there_is_no_step_to_compile(capsys):
  assert run("--fdl_config=Gpt3_52k", "--mode=compile", "--fiddler=quantize_weights") == 2
  assert "cannot be trained" in capsys.readouterr().err


def test_a_scheme_that_is_none_is_said():
  with pytest.raises(UserError, match=r"no weight-only quantization int5.*Did you mean int"):
    fiddlers.quantize_weights(registry.find("Gpt3_52k")().trainer(), "int5")
