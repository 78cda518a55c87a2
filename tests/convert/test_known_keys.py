# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT, made without it: each key of their configuration is read or refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tokenizers
from helpers import tiny_llama
from helpers.tiny_llama import DIM, LAYERS, VOCAB

from paxlike import registry
from paxlike.config import graph_file
from paxlike.convert import adapters
from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorSpec, write_file

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """A converted model with a tokenizer, in a folder whose name JSON escapes."""
  folder = tmp_path_factory.mktemp("base")
  tiny_llama.write(folder / "theirs")
  words = tokenizers.models.WordLevel({f"t{n}": n for n in range(VOCAB)}, unk_token="t0")
  tokenizers.Tokenizer(words).save(str(folder / "theirs" / "tokenizer.json"))
  assert run(["--from=hf", f"--path={folder / 'theirs'}", f"--to={folder / 'späce'}"]) == 0
  return folder / "späce"


def write(folder, more=None, **changed):
  """Writes an adapter; what is None is not there."""
  folder.mkdir()
  specs = {**(more or {})}
  for layer in range(LAYERS):
    module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
    specs[f"{module}.lora_A.weight"] = TensorSpec((4, DIM), np.dtype("float32"))
    specs[f"{module}.lora_B.weight"] = TensorSpec((DIM, 4), np.dtype("float32"))
  file = folder / "adapter_model.safetensors"
  write_file(file, specs, lambda name: np.ones(specs[name].shape, "f"))
  (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changed))


@pytest.mark.parametrize(
  ("changed", "said"),
  [
    ({"r": "x"}, "r: expected an int of at least 1, got 'x'"),
    ({"r": 0}, "r: expected an int of at least 1, got 0"),
    ({"r": 4.7}, "r: expected an int"),
    ({"r": True}, "r: expected an int"),
    ({"r": None}, "lacks r"),
    ({"lora_alpha": None}, "lacks lora_alpha"),
    ({"lora_alpha": "8"}, "lora_alpha: expected a float of at least 1e-30, got '8'"),
    ({"lora_alpha": 1e300}, "lora_alpha: expected a float"),
    ({"lora_dropout": 2}, "lora_dropout: expected a float"),
    ({"use_rslora": "false"}, "use_rslora: expected bool"),
    ({"peft_type": ["LORA"]}, "is not a LoRA adapter"),
    ({"mystery": 1}, "mystery=1 is not known to paxlike"),
    ({"alora_invocation_tokens": [1, 2]}, "paxlike has no alora_invocation_tokens=[1, 2]"),
    ({"init_lora_weights": "pissa"}, "paxlike has no init_lora_weights='pissa'"),
    ({"layer_replication": [[0, 2]]}, "paxlike has no layer_replication"),
    ({"layers_to_transform": [0]}, "paxlike has no layers_to_transform=[0]"),
    ({"target_parameters": ["x"]}, "paxlike has no target_parameters"),
    ({"use_qalora": True}, "paxlike has no use_qalora=True; expected False"),
    ({"lora_bias": True}, "paxlike has no lora_bias=True"),
    ({"rank_pattern": {"q_proj": 8}}, "paxlike has no rank_pattern"),
  ],
)
def test_an_adapter_that_is_no_plain_one_is_refused(base, tmp_path, capsys, changed, said):
  write(tmp_path / "peft", **changed)
  flags = [f"--path={tmp_path / 'peft'}", f"--base={base}", f"--to={tmp_path / 'ours'}"]
  assert run(["--from=peft", *flags]) == 2
  error = capsys.readouterr().err
  assert said in error and "adapter_config.json" in error and error.count("\n") == 1
  assert not (tmp_path / "ours").exists()


def test_a_copy_of_another_base_is_refused(base, tmp_path, capsys):
  """Of the embedding, which PEFT writes beside an adapter of it."""
  copy = "base_model.model.model.embed_tokens.base_layer.weight"
  write(tmp_path / "peft", more={copy: TensorSpec((VOCAB, DIM), np.dtype("float32"))})
  flags = [f"--path={tmp_path / 'peft'}", f"--base={base}", f"--to={tmp_path / 'ours'}"]
  assert run(["--from=peft", *flags]) == 2
  assert f"{copy} of the adapter is not the weight of {base}" in capsys.readouterr().err
  assert not (tmp_path / "ours").exists()


@pytest.mark.slow
def test_every_key_of_peft_is_known():
  import peft  # Which imports torch: not for the quick tests.

  declared = adapters._DECLARED
  known = declared.kinds.keys() | declared.fixed.keys() | declared.neutral
  assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= known
  config = peft.LoraConfig(r=4, target_modules=["q_proj"]).to_dict()
  assert declared.read(json.loads(json.dumps(config, default=list)), place="x")["r"] == 4


@pytest.mark.parametrize("given", ["{}", "{}/", "{}/../späce", "link"])
def test_the_tokenizer_of_an_adapter_is_its_own(base, tmp_path, monkeypatch, given):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "link").symlink_to(base)
  write(tmp_path / "peft", init_lora_weights="gaussian", rank_pattern={}, layer_replication=None)
  flags = ["--path=peft", f"--base={given.format(base)}", "--to=ours"]
  assert run(["--from=peft", *flags]) == 0
  shutil.move(tmp_path / "ours", tmp_path / "moved")
  path = str(tmp_path / "moved" / "tokenizer.json")
  experiment = registry.load(tmp_path / "moved" / "experiment.json")
  graph = graph_file.read(tmp_path / "moved" / "config.json")
  assert experiment.values()["VOCAB_PATH"].value == path
  assert graph.train_data.corpus.tokenizer.path == path
  assert "tokenizer.json" not in graph.restore.path
  assert run(["--from=paxlike", "--path=moved", "--to=merged"]) == 0
