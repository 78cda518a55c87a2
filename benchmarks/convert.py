# SPDX-License-Identifier: Apache-2.0
"""Converts a large random LLaMA both ways and reports how much memory that takes.

    python benchmarks/convert.py [--layers=12] [--dim=4096] [--folder=DIR]

Each way is a process of its own. Memory is what the process owns (RssAnon), polled; pages of mapped
files are the system's, which takes them back when it likes. Prints one JSON line.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import ml_dtypes
import numpy as np

from paxlike.convert import safetensors_files
from paxlike.convert.safetensors_files import TensorSpec

VOCAB = 32000


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--layers", type=int, default=12)
  parser.add_argument("--dim", type=int, default=4096)
  parser.add_argument("--folder", help="where there is room; default: the system's for such files")
  options = parser.parse_args()
  with tempfile.TemporaryDirectory(dir=options.folder) as name:
    folder = pathlib.Path(name)
    specs = write_random(folder / "theirs", options.layers, options.dim)
    largest = max(4 * np.prod(spec.shape) for spec in specs.values())
    report: dict[str, Any] = {
      "benchmark": "convert",
      "jax": jax.__version__,
      "gigabytes": round(sum(2 * np.prod(s.shape) for s in specs.values()) / 1e9, 3),
      "largest_tensor_megabytes_float32": round(largest / 1e6, 1),
    }
    report["in"] = measured("hf", folder / "theirs", folder / "ours")
    shutil.rmtree(folder / "theirs")
    report["out"] = measured("paxlike", folder / "ours", folder / "back")
  for way in ("in", "out"):
    above = report[way]["peak_megabytes"] - report[way]["megabytes_before"]
    report[way]["above_over_largest"] = round(above * 1e6 / largest, 2)
  print(json.dumps(report))


def write_random(folder: pathlib.Path, num_layers: int, dim: int) -> dict[str, TensorSpec]:
  """Writes a LLaMA in bfloat16; its numbers repeat, as they do not matter."""
  hidden = 11 * dim // 4
  shapes: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, dim),
    "lm_head.weight": (VOCAB, dim),
  }
  for layer in range(num_layers):
    at = f"model.layers.{layer}"
    shapes |= {f"{at}.self_attn.{name}_proj.weight": (dim, dim) for name in "qkvo"}
    shapes |= {f"{at}.mlp.{name}_proj.weight": (hidden, dim) for name in ("gate", "up")}
    shapes[f"{at}.mlp.down_proj.weight"] = (dim, hidden)
    for norm in ("input_layernorm", "post_attention_layernorm"):
      shapes[f"{at}.{norm}.weight"] = (dim,)
  shapes["model.norm.weight"] = (dim,)
  specs = {name: TensorSpec(s, np.dtype(ml_dtypes.bfloat16)) for name, s in shapes.items()}
  some = np.random.default_rng(0).normal(size=1 << 20).astype(ml_dtypes.bfloat16)
  folder.mkdir()
  safetensors_files.write(folder, specs, lambda name: np.resize(some, shapes[name]))
  config = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "num_hidden_layers": num_layers,
    "hidden_size": dim,
    "intermediate_size": hidden,
    "num_attention_heads": dim // 128,
    "rms_norm_eps": 1e-5,
  }
  (folder / "config.json").write_text(json.dumps(config))
  return specs


def measured(source: str, path: pathlib.Path, to: pathlib.Path) -> dict[str, float]:
  """Converts in another process; returns its seconds and its memory, before and at its peak."""
  command = [sys.executable, "-m", "paxlike.convert.main", f"--from={source}", f"--path={path}"]
  idle = max(_poll([*command, f"--to={to}", "--dry_run"]))
  began = time.perf_counter()
  peak = max(_poll([*command, f"--to={to}"]))
  return {
    "seconds": round(time.perf_counter() - began, 1),
    "megabytes_before": round(idle / 1000, 1),
    "peak_megabytes": round(peak / 1000, 1),
  }


def _poll(command: list[str]) -> list[int]:
  """Runs a command; returns kilobytes of memory that its process owned, now and then."""
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  status = pathlib.Path(f"/proc/{process.pid}/status")
  owned = [0]
  while process.poll() is None:
    lines = status.read_text().splitlines()
    owned += [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
    time.sleep(0.02)
  if process.returncode:
    sys.exit(process.returncode)
  return owned


if __name__ == "__main__":
  main()
