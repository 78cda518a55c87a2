# SPDX-License-Identifier: Apache-2.0
"""What is exported as GGUF is the same model for transformers' reader of GGUF."""

import gguf
import numpy as np
import pytest
from helpers import exports
from helpers.hf_families import LLAMA3_SCALING, YARN
from helpers.hf_models import save_random
from helpers.tiny_tokenizers import TEXTS, large, sentencepiece

from paxlike.convert.main import run

WIDE = {"hidden_size": 64, "intermediate_size": 96}
# Their reader gives these families their published head sizes, whatever the file says.
QWEN3 = {**WIDE, "head_dim": 128}
GEMMA = {**WIDE, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 6}
# Models of which their reader leaves out a part of the configuration: they need `config.json`.
BY_CONFIG = {"llama_with_biases", "llama31"}
MODELS = {
  "llama": WIDE,
  "llama_tied": WIDE,
  "llama_with_biases": WIDE,
  "llama31": WIDE,
  "mistral_without_window": WIDE,
  "qwen2": {**WIDE, "head_dim": 16},
  "qwen2_tied": {**WIDE, "head_dim": 16},
  "qwen3": QWEN3,
  "gemma2": GEMMA,
  "gemma3": {**GEMMA, "rope_parameters": None},
}


def exported(folder, name, *flags, **options):
  theirs = save_random(name, folder / "theirs", **options)
  assert run(["--from=hf", f"--path={folder / 'theirs'}", f"--to={folder / 'ours'}"]) == 0
  assert export(folder, *flags) == 0
  return theirs


def export(folder, *flags):
  return run(["--from=paxlike", f"--path={folder / 'ours'}", f"--to={folder / 'out'}", *flags])


def logits(model):
  import torch

  tokens = np.random.default_rng(0).integers(3, 96, (2, 24))
  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.float().numpy()


def reloaded(folder, *, config=False):
  import torch
  import transformers

  options = {"config": transformers.AutoConfig.from_pretrained(folder / "out")} if config else {}
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder / "out", gguf_file="model.gguf", dtype=torch.float32, **options
  ).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_from_the_file(tmp_path, name):
  theirs = exported(tmp_path, name, "--to_format=gguf", **MODELS[name])
  expected = logits(theirs)
  assert np.abs(expected).max() > 0.5
  np.testing.assert_allclose(
    logits(reloaded(tmp_path, config=name in BY_CONFIG)), expected, atol=1e-5
  )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "F16", "BF16"])
def test_matrices_are_rounded_and_vectors_are_not(tmp_path, kind):
  theirs = exported(tmp_path, "llama", *exports.GGUF[kind], **WIDE)
  exports.round_matrices(theirs, kind)
  np.testing.assert_allclose(logits(reloaded(tmp_path)), logits(theirs), atol=1e-5)
  stored = {
    str(tensor.name): tensor for tensor in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors
  }
  assert stored["blk.0.attn_q.weight"].tensor_type.name == kind
  assert stored["output_norm.weight"].tensor_type.name == "F32"


def test_scaled_rotary_positions_are_in_the_file(tmp_path):
  from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

  theirs = exported(tmp_path, "llama31", "--to_format=gguf")
  scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs.config, "cpu")
  plain = 1 / 500_000.0 ** (np.arange(0, 16, 2) / 16)
  found = next(t for t in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors if "rope" in t.name)
  assert LLAMA3_SCALING["factor"] == found.data.max() and found.data.min() < 8
  np.testing.assert_allclose(found.data, plain / scaled.numpy(), rtol=1e-5)


def fields(folder):
  found = gguf.GGUFReader(folder / "out/model.gguf").fields
  return {name: field.contents() for name, field in found.items()}


def test_what_their_reader_does_not_read_is_in_the_file(tmp_path):
  theirs = exported(tmp_path, "gemma2", "--to_format=gguf", **GEMMA)
  found = fields(tmp_path)
  assert found["gemma2.attn_logit_softcapping"] == theirs.config.attn_logit_softcapping == 50
  assert found["gemma2.final_logit_softcapping"] == theirs.config.final_logit_softcapping == 30
  assert found["gemma2.attention.key_length"] == found["gemma2.attention.value_length"] == 256
  exported(tmp_path / "yarn", "qwen3", "--to_format=gguf", rope_parameters=YARN)
  found = fields(tmp_path / "yarn")
  assert found["qwen3.rope.scaling.type"] == "yarn"
  assert found["qwen3.rope.scaling.factor"] == YARN["factor"]
  assert found["qwen3.rope.scaling.original_context_length"] == 16


@pytest.mark.parametrize(
  ("name", "flags", "said"),
  [
    ("gpt2", ["--to_format=gguf"], "--to_format=gguf is for llama, mistral, "),
    ("mistral", ["--to_format=gguf"], "has full attention, not sliding_window=6"),
    ("gemma2", ["--to_format=gguf"], "query_pre_attn_scalar=24 (QUERY_SCALE_DIMS)"),
    ("qwen3_with_biases", ["--to_format=gguf"], "qwen3 of llama.cpp has no place for "),
    ("llama", ["--to_format=gguf_q8_0"], "has blocks of 32, but model.layers.0.mlp.down_proj"),
    ("llama", ["--to_format=gguf_q8"], "--to_format=gguf_q8 is unknown. Did you mean gguf_q8_0?"),
    ("llama", ["--to_format=gguf_q8_0", "--dtype=float16"], "leave out --dtype"),
    ("llama", ["--to_format=gguf", "--adapter"], "leave it out"),
  ],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path, capsys, name, flags, said):
  save_random(name, tmp_path / "theirs")
  assert run(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={tmp_path / 'ours'}"]) == 0
  for more in ([], ["--dry_run"]):
    capsys.readouterr()
    assert export(tmp_path, *flags, *more) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def byte_level(folder, split):
  """Saves a byte-level BPE of a class of transformers that splits texts by its own rule."""
  import tokenizers
  import transformers

  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = getattr(transformers, split)().backend_tokenizer.pre_tokenizer
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=390,
    special_tokens=["<|endoftext|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(TEXTS * 4, trainer)
  made.save(str(folder / "tokenizer.json"))


BYTES = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 390, "hard_vocab_limit": False}
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2Tokenizer", "sentencepiece", "its json"])
def test_transformers_tokenizes_by_the_file_alone(tmp_path, kind):
  import transformers

  theirs = tmp_path / "theirs"
  large(theirs)
  if kind.endswith("Tokenizer"):
    byte_level(theirs, kind)
    (theirs / "chat_template.jinja").write_text("{{ messages }}")
  else:
    sentencepiece(theirs / "tokenizer.model", **BYTES, **IDENTITY)
  assert run(["--from=hf", f"--path={theirs}", f"--to={tmp_path / 'ours'}"]) == 0
  if kind == "its json":
    assert export(tmp_path) == 0
    (tmp_path / "out").rename(tmp_path / "plain")
    run(["--from=hf", f"--path={tmp_path / 'plain'}", f"--to={tmp_path / 'again'}"])
    (tmp_path / "ours").rename(tmp_path / "before")
    (tmp_path / "again").rename(tmp_path / "ours")
    assert not (tmp_path / "ours/tokenizer.model").exists()
  assert export(tmp_path, "--to_format=gguf") == 0
  alone = tmp_path / "alone"
  alone.mkdir()
  (tmp_path / "out/model.gguf").rename(alone / "model.gguf")
  read = transformers.AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")
  plain = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
  assert len(read) == 400
  for text in TEXTS:
    # Their reader adds no space before a text that begins with one, as llama.cpp does.
    if kind.endswith("Tokenizer") or text == text.lstrip(" ▁"):
      assert read.encode(text) == plain.encode(text), text
  assert read.chat_template == plain.chat_template
