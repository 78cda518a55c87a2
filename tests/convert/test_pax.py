# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Pax wrote compute here what they computed there."""

import pytest
from helpers.jax_programs import archives, assert_same_logits, extract, flags

from paxlike.convert.jax_checkpoint import JaxCheckpoint, Requested

SIZES = {
  "VOCAB_SIZE": 64,
  "MAX_SEQ_LEN": 32,
  "MODEL_DIMS": 16,
  "HIDDEN_DIMS": 24,
  "NUM_LAYERS": 4,
  "NUM_HEADS": 4,
  "DIMS_PER_HEAD": 8,
}
EXPERIMENTS = {
  "gpt": ("Pile126M", SIZES),
  "llama": ("LLaMA7B", SIZES),
  "llama_grouped": ("LLaMA7B", {**SIZES, "NUM_KV_HEADS": 2}),
  "llama_one_kv_head": ("LLaMA7B", {**SIZES, "NUM_KV_HEADS": 1}),
  "glam": ("LambadaGLaM126M64E", {**SIZES, "NUM_EXPERTS": 4}),
}


def experiment_of(name):
  return EXPERIMENTS[name.removesuffix("_repeated").removesuffix("_database")]


@pytest.mark.slow
@pytest.mark.parametrize("name", archives("pax"))
def test_logits_equal_those_of_pax(tmp_path, name):
  folder = extract("pax", name, tmp_path)
  assert_same_logits("pax", folder, tmp_path / "ours", *flags(*experiment_of(name)))


def opened(path):
  experiment, sizes = experiment_of("gpt")
  return JaxCheckpoint.pax(path, Requested(experiment, [(k, str(v)) for k, v in sizes.items()]))
