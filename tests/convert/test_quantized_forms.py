# SPDX-License-Identifier: Apache-2.0
"""A quantized export is, in transformers, the model of quantization-aware training."""

import json

import numpy as np
import pytest
from helpers.exports import QUANTIZED, SIZES, TOKENS, reloaded
from helpers.hf_models import imported, logits, save_random

from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder, read_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with a model as paxlike's, in `ours`."""
  made = tmp_path_factory.mktemp("llama")
  save_random("llama", made / "theirs", **SIZES)
  assert run(["--from=hf", f"--path={made / 'theirs'}", f"--to={made / 'ours'}"]) == 0
  return made


def export(folder, name, *flags):
  flags = (f"--path={folder / 'ours'}", f"--to={folder / name}", f"--to_format={name}", *flags)
  return run(["--from=paxlike", *flags])


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_exported_is_what_was_trained(folder, name):
  assert export(folder, name) == 0
  expected = logits(*imported(folder / "ours", quantization=QUANTIZED[name]), TOKENS)
  plain = logits(*imported(folder / "ours"), TOKENS)
  assert np.abs(expected - plain).max() > 1e-3
  close = {"atol": 1e-5 * np.abs(expected).max(), "rtol": 0}
  np.testing.assert_allclose(reloaded(folder / name), expected, **close)
  back = folder / f"{name} again"
  assert run(["--from=hf", f"--path={folder / name}", f"--to={back}"]) == 0
  np.testing.assert_allclose(logits(*imported(back), TOKENS), expected, **close)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "form", "said"),
  [
    ("gpt2", "fp8_blocks", "quantizes linear maps named *_proj, of which this model has none"),
    ("gpt_oss", "compressed_fp8", "has no place for model.layers.0.mlp.experts."),
    ("mixtral", "compressed_fp8", "has no place for model.layers.0.block_sparse_moe.experts."),
    ("llama", "compressed_int4", "has groups of 128 weights, but model.layers.0."),
  ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path, capsys, name, form, said):
  save_random(name, tmp_path / "theirs")
  assert run(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={tmp_path / 'ours'}"]) == 0
  capsys.readouterr()
  assert export(tmp_path, form) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / form).exists()


CHANGES = {
  "symmetric is False": ("weights", {"symmetric": False}),
  "actorder is 'group'": ("weights", {"actorder": "group"}),
  "static input_activations": ("input_activations", {"dynamic": False}),
  "format is 'marlin-24'": ("format", "marlin-24"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_setting_that_paxlike_lacks_is_refused(folder, tmp_path, capsys, said):
  theirs = tmp_path / "compressed_int8"
  (tmp_path / "ours").symlink_to(folder / "ours")
  assert export(tmp_path, "compressed_int8") == 0
  config = read_json(theirs / "config.json")
  key, value = CHANGES[said]
  group = config["quantization_config"]["config_groups"]["group_0"]
  group[key] = group[key] | value if key == "weights" else value
  (theirs / "config.json").write_text(json.dumps(config))
  assert run(["--from=hf", f"--path={theirs}", f"--to={tmp_path / 'back'}"]) == 2
  assert said in capsys.readouterr().err


def test_published_rules_of_fp8_give_the_same_weights(folder):
  """Those of DeepSeek: each block of 128 x 128 times its scale."""
  if not (folder / "fp8_blocks").exists():
    assert export(folder, "fp8_blocks") == 0
  tensors, plain = TensorFolder(folder / "fp8_blocks"), TensorFolder(folder / "theirs")
  name = "model.layers.0.mlp.down_proj.weight"
  values, scales = tensors.read(name).astype(np.float32), tensors.read(f"{name}_scale_inv")
  assert values.shape == (256, 384) and scales.shape == (2, 3)
  weight = plain.read(name)
  for row in range(2):
    for column in range(3):
      block = slice(row * 128, (row + 1) * 128), slice(column * 128, (column + 1) * 128)
      got = values[block] * scales[row, column]
      error = np.abs(got - weight[block]).max()
      assert 0 < error <= np.abs(weight[block]).max() / 28 + 1e-6
      assert np.abs(values[block]).max() == 448
