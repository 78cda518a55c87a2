# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training multiplies by quantized weights and trains the weights themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hf_models import imported, logits

import paxlike
from paxlike import layers, registry
from paxlike.convert.main import run
from paxlike.errors import UserError
from paxlike.layers.precision import quantization_aware
from paxlike.layers.precision.matmul import LinearForm

RULES = {
  layers.QatInt8: quantization_aware.INT8,
  layers.QatInt4: quantization_aware.INT4,
  layers.QatFp8: quantization_aware.FP8,
  layers.QatFp8Blocks: quantization_aware.FP8_BLOCKS,
}
SIZES = {"NUM_LAYERS": 2, "MODEL_DIMS": 128, "HIDDEN_DIMS": 128, "NUM_HEADS": 2}
TINY = {**SIZES, "VOCAB_SIZE": 96, "MAX_SEQ_LEN": 32, "PERCORE_BATCH_SIZE": 1, "MAX_STEPS": 3}


def random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("kind", RULES)
def test_gradients_are_those_of_the_rounded_weight_and_go_to_the_weight(kind):
  x, w = random(6, 256), random(256, 200, seed=1)
  rule = RULES[kind]
  used = rule.dequantized(rule.round(w))
  assert 0 < np.abs(used - w).max() <= np.abs(w).max() / 14 + 1e-2
  np.testing.assert_allclose(rule.dequantized(rule.round(used)), used, rtol=0.01, atol=1e-6)
  form = LinearForm()
  got, back = jax.vjp(lambda x, w: kind()(form, x, w), x, w)
  expected, plain = jax.vjp(jnp.dot, x, used)
  np.testing.assert_allclose(got, expected, atol=1e-4)
  for one, other in zip(back(got), plain(got), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_a_weight_of_zeros_and_sizes_that_do_not_fit():
  for rule in RULES.values():
    assert not np.any(rule.dequantized(rule.round(jnp.zeros((128, 130)))))
  with pytest.raises(UserError, match="groups of 128 weights, but a linear map has 96 inputs"):
    quantization_aware.INT4.round(jnp.ones((96, 4)))
  experiment = registry.find("SyntheticLLaMA7B")(QUANTIZATION="qat_int8", USE_LORA=True)
  with pytest.raises(UserError, match="USE_LORA freezes them: leave one of them out"):
    experiment.trainer()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_of_a_run_is_the_model_that_it_trained(tmp_path, dtype):
  import torch
  import transformers

  tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
  knobs = {**TINY, "QUANTIZATION": "qat_int4", "FPROP_DTYPE": dtype}
  paxlike.train("SyntheticLLaMA7B", folder=tmp_path / "run", **knobs)
  to = tmp_path / "out"
  flags = (f"--path={tmp_path / 'run'}", f"--to={to}", "--to_format=compressed_int4")
  assert run(["--from=paxlike", *flags]) == 0
  definition, params = imported(tmp_path / "run")
  params = {name: value.astype(dtype).astype("float32") for name, value in params.items()}
  expected = logits(definition, params, tokens)
  model = transformers.AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()
  with torch.no_grad():
    got = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
