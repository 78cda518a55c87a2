# SPDX-License-Identifier: Apache-2.0
"""Every family computes what Hugging Face's model of the same weights computes."""

import collections
import json
import re

import numpy as np
import pytest
from helpers import tiny_llama
from helpers.hf_families import COMMON, FAMILIES, VISION
from helpers.hf_models import config_of, converted, logits, save_random
from helpers.parity import changed_by_the_way_back, distance
from helpers.teacher_forcing import assert_teacher_forcing, prompts

from paxlike.convert.importing import Source
from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder
from paxlike.errors import UserError
from paxlike.inference import generate

# One family of each kind of cache, positions and experts: the others decode by the same code.
DECODED = (
  *("gpt2", "llama", "mistral", "ministral3", "gemma2", "gemma3", "gemma4", "gemma4_shared"),
  *("phi3_long", "mixtral", "deepseek_v3", "deepseek_v32", "glm4_moe", "llama4", "gpt_oss"),
  *("granite4", "nemotron_h", "falcon_h1", "qwen3_next"),
)


# In this order, both tests of a family come one after the other.
@pytest.fixture(scope="module", params=[*DECODED, *(n for n in FAMILIES if n not in DECODED)])
def family(request, tmp_path_factory):
  """(Hugging Face's model, a folder with it in `theirs` and `ours`, our model, its weights)."""
  folder = tmp_path_factory.mktemp(request.param)
  theirs = save_random(request.param, folder / "theirs")
  return theirs, folder, *converted(folder / "theirs", folder / "ours")


@pytest.mark.slow
def test_logits_equal_hugging_face(family):
  theirs, _, definition, params = family
  found = distance(theirs, definition, params)
  assert found.largest > 0.5
  assert found.difference < 1e-4


@pytest.mark.slow
def test_the_way_back_is_exact(family):
  import torch
  import transformers

  theirs, folder, _, _ = family
  assert changed_by_the_way_back(folder) == []
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    folder / "back", attn_implementation="eager"
  )
  again, tokens = loaded.eval(), torch.arange(3, 27)[None]
  with torch.no_grad():
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODED, indirect=True)
def test_cached_decode_equals_teacher_forcing(family, monkeypatch):
  monkeypatch.setattr(generate, "_LEAST_ROOM", 4)
  _, _, definition, params = family
  # Shorter and longer than windows, and two rows for three. Before LongRoPE's switch, tokens are
  # those of other frequencies.
  least = definition.module.rope_switch or 0
  given = prompts(least + 9, least + 2, least + 13)
  texts = generate.generate(definition, params, given, max_new_tokens=12, num_rows=2)
  assert_teacher_forcing(definition, params, given, texts)


@pytest.mark.slow
def test_a_text_that_outgrows_the_short_factors_goes_on_as_in_transformers(tmp_path):
  import torch

  theirs = save_random("phi3_long", tmp_path / "theirs")
  definition, params = converted(tmp_path / "theirs", tmp_path / "ours")
  given = prompts(9, 2, 16, 17)  # The switch is after 16 tokens.
  texts = generate.generate(definition, params, given, max_new_tokens=20, num_rows=2)
  for prompt, text in zip(given, texts, strict=True):
    tokens = torch.tensor(prompt, dtype=torch.long)[None]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert text.tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_a_gpt2_saved_without_its_head_is_the_same(tmp_path):
  theirs = save_random("gpt2", tmp_path / "whole")
  theirs.transformer.save_pretrained(tmp_path / "inner")
  whole = converted(tmp_path / "whole", tmp_path / "ours")
  inner = converted(tmp_path / "inner", tmp_path / "ours_too")
  assert whole[1].keys() == inner[1].keys()
  for name, value in whole[1].items():
    np.testing.assert_array_equal(value, inner[1][name])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "wrapper", "whole"),
  [
    ("gemma3", "Gemma3", {"mm_tokens_per_image": 1}),
    ("mistral_without_window", "Mistral3", {"tie_word_embeddings": False}),
    ("ministral3", "Mistral3", {"tie_word_embeddings": False}),
  ],
)
def test_the_text_part_of_a_model_with_images_is_taken_in_either_layout(
  name, wrapper, whole, tmp_path
):
  import torch
  import transformers

  config_class, options = FAMILIES[name]
  text = getattr(transformers, config_class)(**{**COMMON, **options}).to_dict()
  config = getattr(transformers, f"{wrapper}Config")(
    text_config=text, vision_config=VISION, **whole
  )
  torch.manual_seed(0)
  theirs = getattr(transformers, f"{wrapper}ForConditionalGeneration")(config).eval()
  theirs.save_pretrained(tmp_path / "theirs")
  saved = TensorFolder(tmp_path / "theirs")
  arrays = {name: saved.read(name) for name in saved.specs}
  text = {re.sub(r"^(model\.language_model|language_model\.model)", "", n): n for n in arrays}
  tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  for layout in ("language_model.model", "model.language_model"):
    folder = tmp_path / layout
    renamed = {layout + n if n.startswith(".") else n: arrays[old] for n, old in text.items()}
    assert any(name.startswith(layout) for name in renamed)
    tiny_llama.write(folder, renamed, config_of(tmp_path / "theirs"))
    got = logits(*converted(folder, folder / "ours"), tokens)
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.slow
def test_the_text_part_of_qwen35_is_taken_as_it_is_published(tmp_path):
  """With the matrices of all experts in one tensor, and keys that transformers does not write."""
  import torch
  import transformers

  vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
  config = transformers.Qwen3_5MoeConfig(
    text_config={**COMMON, **FAMILIES["qwen3_5_moe"][1]},
    vision_config={**vision, "out_hidden_size": 32, "num_position_embeddings": 16},
  )
  torch.manual_seed(0)
  theirs = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
  theirs.save_pretrained(tmp_path / "theirs")
  saved = TensorFolder(tmp_path / "theirs")
  arrays = {name: saved.read(name) for name in saved.specs}
  for layer in range(5):
    at = f"model.language_model.layers.{layer}.mlp.experts"
    gate, up, down = (
      np.stack([arrays.pop(f"{at}.{expert}.{role}_proj.weight") for expert in range(6)])
      for role in ("gate", "up", "down")
    )
    arrays |= {f"{at}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}.down_proj": down}
  arrays["mtp.fc.weight"] = np.zeros((32, 64), np.float32)
  published = config_of(tmp_path / "theirs")
  published["text_config"] |= {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
  }
  published["text_config"]["rope_parameters"] |= {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
  }
  tiny_llama.write(tmp_path / "published", arrays, published)
  tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  got = logits(*converted(tmp_path / "published", tmp_path / "ours"), tokens)
  np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_of_torch_are_those_of_safetensors(tmp_path, shards):
  import torch

  tiny_llama.write(tmp_path / "safe")
  bins = tmp_path / "bins"
  bins.mkdir()
  (bins / "config.json").write_text((tmp_path / "safe" / "config.json").read_text())
  named = [(n, torch.tensor(v)) for n, v in tiny_llama.values(tiny_llama.shapes()).items()]
  places = {}
  for shard in range(shards):
    file = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{shard}.bin"
    part = collections.OrderedDict(named[shard::shards])
    part._metadata = {}  # pyright: ignore[reportAttributeAccessIssue] - As torch's modules have it.
    torch.save(part, bins / file)
    places |= dict.fromkeys(part, file)
  if shards > 1:
    index = {"weight_map": places}
    (bins / "pytorch_model.bin.index.json").write_text(json.dumps(index))
  one, two = Source.hugging_face(tmp_path / "safe"), Source.hugging_face(bins)
  for (name, value), (other, same) in zip(one._weights(), two._weights(), strict=True):
    assert name == other
    np.testing.assert_array_equal(value, same)


def test_an_index_of_torch_names_files_of_its_folder(tmp_path):
  tiny_llama.write(tmp_path / "theirs")
  (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "outside")
  index = {"weight_map": {"model.norm.weight": "../outside"}}
  (tmp_path / "theirs" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
  with pytest.raises(UserError, match=r"names '\.\./outside', which is not in its folder"):
    Source.hugging_face(tmp_path / "theirs")


def test_a_head_that_should_be_tied_and_is_not_is_refused(tmp_path, capsys):
  tied = {**tiny_llama.CONFIG, "tie_word_embeddings": True}
  tiny_llama.write(tmp_path / "theirs", config=tied)
  assert run(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={tmp_path / 'ours'}"]) == 2
  assert "lm_head.weight is not a copy of model.embed_tokens.weight" in capsys.readouterr().err
  arrays = tiny_llama.values(tiny_llama.shapes())
  arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
  tiny_llama.write(tmp_path / "theirs", arrays, tied)
  assert run(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={tmp_path / 'ours'}"]) == 0


def test_the_golden_logits_of_stories260k(shared_data, tmp_path):
  definition, params = converted(shared_data / "stories260K", tmp_path / "ours")
  golden = np.load(shared_data / "stories260K" / "golden_logits.npz")
  got = logits(definition, params, golden["tokens"][None])[0]
  np.testing.assert_allclose(got, golden["logits"], atol=1e-4)
