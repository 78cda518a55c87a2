# SPDX-License-Identifier: Apache-2.0
"""How far exports are from our models when transformers reads them: a table of docs/results.md.

PYTHONPATH=tests python -m helpers.exports
"""

import contextlib
import io
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from helpers.hf_models import imported, logits, save_random
from paxlike.convert.main import run

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
# Format -> the QUANTIZATION with which paxlike computes the same model.
QUANTIZED = {
  "fp8_blocks": "qat_fp8_blocks",
  "compressed_fp8": "qat_fp8",
  "compressed_int8": "qat_int8",
  "compressed_int4": "qat_int4",
}
# Type of ggml -> the flags of paxlike-convert.
GGUF = {
  "F32": ("--to_format=gguf", "--dtype=float32"),
  "F16": ("--to_format=gguf", "--dtype=float16"),
  "BF16": ("--to_format=gguf", "--dtype=bfloat16"),
  "Q8_0": ("--to_format=gguf_q8_0",),
}
TOKENS = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)


def export(folder: pathlib.Path, to: str, *flags: str) -> int:
  """Exports the model in `ours` of a folder; returns the exit status."""
  return run(["--from=paxlike", f"--path={folder / 'ours'}", f"--to={folder / to}", *flags])


def of_transformers(model: Any) -> np.ndarray:
  """Returns the logits of a model of transformers."""
  import torch

  with torch.no_grad():
    return model(torch.tensor(TOKENS, dtype=torch.long)).logits.float().numpy()


def reloaded(folder: pathlib.Path, **options: Any) -> np.ndarray:
  """Returns the logits of an exported model, read by transformers."""
  import torch
  import transformers

  auto = transformers.AutoModelForCausalLM
  return of_transformers(auto.from_pretrained(folder, dtype=torch.float32, **options).eval())


def rounded(value: np.ndarray, kind: str) -> np.ndarray:
  """Returns a matrix as a type of ggml keeps it, by its published rule."""
  import ml_dtypes

  if kind != "Q8_0":
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    return value.astype(dtypes[kind]).astype(np.float32)
  blocks = value.reshape(-1, 32)
  scale = np.abs(blocks).max(1, keepdims=True) / 127
  numbers = np.sign(blocks) * np.floor(np.abs(blocks / scale) + 0.5)
  return (numbers * scale.astype(np.float16).astype(np.float32)).reshape(value.shape)


def round_matrices(model: Any, kind: str):
  """Rounds the matrices of a model of transformers, in place."""
  import torch

  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.ndim > 1:
        parameter.copy_(torch.tensor(rounded(parameter.numpy(), kind)))


def main() -> int:
  """Prints the table."""
  found = {}
  with (
    tempfile.TemporaryDirectory() as name,
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(io.StringIO()),
  ):
    folder = pathlib.Path(name)
    save_random("llama", folder / "theirs", **SIZES)
    assert run(["--from=hf", f"--path={folder / 'theirs'}", f"--to={folder / 'ours'}"]) == 0
    plain = logits(*imported(folder / "ours"), TOKENS)
    for form, quantization in QUANTIZED.items():
      assert export(folder, form, f"--to_format={form}") == 0
      expected = logits(*imported(folder / "ours", quantization=quantization), TOKENS)
      found[form] = expected, reloaded(folder / form)
    for kind, flags in GGUF.items():
      assert export(folder, kind, *flags) == 0
      model = save_random("llama", folder / f"{kind} of theirs", **SIZES)
      round_matrices(model, kind)
      read = reloaded(folder / kind, gguf_file="model.gguf")
      found[f"gguf, {kind}"] = of_transformers(model), read
  print("| format | largest logit | difference of what was read | difference by rounding |")
  print("|---|---:|---:|---:|")
  for form, (expected, read) in found.items():
    largest, off = np.abs(expected).max(), np.abs(read - expected).max()
    print(f"| {form} | {largest:.2f} | {off:.1e} | {np.abs(expected - plain).max():.1e} |")
  return 0


if __name__ == "__main__":
  sys.exit(main())
