# SPDX-License-Identifier: Apache-2.0
"""Every family computes what Hugging Face's model of the same weights computes."""

import numpy as np
import pytest
from families import FAMILIES, converted, logits, save_random
from test_generate import assert_teacher_forcing, prompts

from paxlike import generate
from paxlike.convert.main import run
from paxlike.convert.tensors import TensorFolder


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
  """(Hugging Face's model, a folder with it in `theirs` and `ours`, our model, its weights)."""
  folder = tmp_path_factory.mktemp(request.param)
  theirs = save_random(request.param, folder / "theirs")
  return theirs, folder, *converted(folder / "theirs", folder / "ours")


@pytest.mark.slow
def test_logits_equal_hugging_face(family):
  import torch

  theirs, _, definition, params = family
  tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  assert np.abs(expected).max() > 0.5
  np.testing.assert_allclose(logits(definition, params, tokens), expected, atol=1e-4)


@pytest.mark.slow
def test_the_way_back_is_exact(family):
  import torch
  import transformers

  theirs, folder, _, _ = family
  assert run(["--from=paxlike", f"--path={folder / 'ours'}", f"--to={folder / 'back'}"]) == 0
  before, after = TensorFolder(folder / "theirs"), TensorFolder(folder / "back")
  assert after.specs.keys() == before.specs.keys()
  for tensor in before.specs:
    assert after.read(tensor).tobytes() == before.read(tensor).tobytes(), tensor
  again = transformers.AutoModelForCausalLM.from_pretrained(folder / "back").eval()
  tokens = torch.arange(3, 27)[None]
  with torch.no_grad():
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_cached_decode_equals_teacher_forcing(family, monkeypatch):
  monkeypatch.setattr(generate, "_LEAST_ROOM", 4)
  _, _, definition, params = family
  # Shorter and longer than windows, and two rows for three.
  given = prompts(9, 2, 13)
  texts = generate.generate(definition, params, given, max_new_tokens=12, num_rows=2)
  assert_teacher_forcing(definition, params, given, texts)


@pytest.mark.slow
def test_a_gpt2_saved_without_its_head_is_the_same(tmp_path):
  theirs = save_random("gpt2", tmp_path / "whole")
  theirs.transformer.save_pretrained(tmp_path / "inner")
  whole = converted(tmp_path / "whole", tmp_path / "ours")
  inner = converted(tmp_path / "inner", tmp_path / "ours_too")
  assert whole[1].keys() == inner[1].keys()
  for name, value in whole[1].items():
    np.testing.assert_array_equal(value, inner[1][name])


def test_the_golden_logits_of_stories260k(shared_data, tmp_path):
  definition, params = converted(shared_data / "stories260K", tmp_path / "ours")
  golden = np.load(shared_data / "stories260K" / "golden_logits.npz")
  got = logits(definition, params, golden["tokens"][None])[0]
  np.testing.assert_allclose(got, golden["logits"], atol=1e-4)
