# SPDX-License-Identifier: Apache-2.0
"""Every family computes what Hugging Face's model of the same weights computes."""

import numpy as np
import pytest
from families import FAMILIES, converted, logits, save_random
from test_generate import assert_teacher_forcing, prompts

from paxlike import generate
from paxlike.convert.main import run
from paxlike.convert.tensors import TensorFolder


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_hugging_face_and_the_way_back_is_exact(name, tmp_path):
  import torch
  import transformers

  model = save_random(name, tmp_path / "theirs")
  definition, params = converted(tmp_path / "theirs", tmp_path / "ours")
  tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
  with torch.no_grad():
    expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  assert np.abs(expected).max() > 0.5
  np.testing.assert_allclose(logits(definition, params, tokens), expected, atol=1e-4)

  assert run(["--from=paxlike", f"--path={tmp_path / 'ours'}", f"--to={tmp_path / 'back'}"]) == 0
  before, after = TensorFolder(tmp_path / "theirs"), TensorFolder(tmp_path / "back")
  assert after.specs.keys() == before.specs.keys()
  for tensor in before.specs:
    assert after.read(tensor).tobytes() == before.read(tensor).tobytes(), tensor
  again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
  with torch.no_grad():
    same = again(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  np.testing.assert_allclose(same, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_cached_decode_equals_teacher_forcing(name, tmp_path, monkeypatch):
  monkeypatch.setattr(generate, "_LEAST_ROOM", 4)
  save_random(name, tmp_path / "theirs")
  definition, params = converted(tmp_path / "theirs", tmp_path / "ours")
  # Shorter and longer than windows, and two rows for three.
  given = prompts(9, 2, 13)
  texts = generate.generate(definition, params, given, max_new_tokens=12, num_rows=2)
  assert_teacher_forcing(definition, params, given, texts)


def test_the_golden_logits_of_stories260k(shared_data, tmp_path):
  definition, params = converted(shared_data / "stories260K", tmp_path / "ours")
  golden = np.load(shared_data / "stories260K" / "golden_logits.npz")
  got = logits(definition, params, golden["tokens"][None])[0]
  np.testing.assert_allclose(got, golden["logits"], atol=1e-4)
