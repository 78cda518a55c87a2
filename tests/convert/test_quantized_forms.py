# SPDX-License-Identifier: Apache-2.0
"""A quantized export is, in transformers, the model of quantization-aware training."""

import numpy as np
import pytest
from helpers.hf_models import imported, logits, save_random

from paxlike.convert.main import run

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
KINDS = {
  "fp8_blocks": "qat_fp8_blocks",
  "compressed_fp8": "qat_fp8",
  "compressed_int8": "qat_int8",
  "compressed_int4": "qat_int4",
}
TOKENS = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)


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


def reloaded(path):
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
  with torch.no_grad():
    return model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_exported_is_what_was_trained(folder, name):
  assert export(folder, name) == 0
  expected = logits(*imported(folder / "ours", quantization=KINDS[name]), TOKENS)
  plain = logits(*imported(folder / "ours"), TOKENS)
  assert np.abs(expected - plain).max() > 1e-3
  close = {"atol": 1e-5 * np.abs(expected).max(), "rtol": 0}
  np.testing.assert_allclose(reloaded(folder / name), expected, **close)
  back = folder / f"{name} again"
  assert run(["--from=hf", f"--path={folder / name}", f"--to={back}"]) == 0
  np.testing.assert_allclose(logits(*imported(back), TOKENS), expected, **close)
