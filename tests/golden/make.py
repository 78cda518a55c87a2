# SPDX-License-Identifier: Apache-2.0
"""Makes the golden runs: `python tests/golden/make.py FOLDER` writes one archive for each.

Run it once, with the version whose files are to be kept; archives are never made anew, as they hold
what that version wrote. Each is a run of a shrunk model that was killed after two of four updates,
with the losses and evaluations of a run that was not.
"""

import os
import pathlib
import shutil
import sys
import tarfile
from typing import Any

import jax

from paxlike import registry
from paxlike.experiments import datasets
from paxlike.main import main

TEXT = pathlib.Path(__file__).parent / "text.txt"

# Name -> (a size of that family, its knobs).
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
  "gpt": ("Synthetic126M", {}),
  "llama2": ("SyntheticLLaMA70B", {}),
  "llama3": ("Llama31_8B", {}),
  "mistral": ("Mistral7B", {}),
  "mixtral": ("Mixtral8x7B", {}),
  "mixtral_capacity": ("Mixtral8x7B", {"MOE_DISPATCH": "capacity"}),
  "gemma": ("Gemma2B", {}),
  "gemma2": ("Gemma2_2B", {}),
  "gemma3": ("Gemma3_1B", {}),
  "qwen3": ("Qwen3_8B", {}),
  "qwen3_moe": ("Qwen3_30B_A3B", {}),
  "gpt_oss": ("GptOss20B", {}),
  "glam": ("SyntheticGLaM126M64E", {}),
  "deepseek": ("DeepSeekV3", {}),
  "gpt_unrolled": ("Synthetic126M", {"USE_REPEATED_LAYER": False}),
  "gpt_pipelined": ("Synthetic126M", {"ICI_MESH_SHAPE": [2, 4, 1, 1], "NUM_MICROBATCHES": 2}),
  "llama_fp8": ("SyntheticLLaMA7B", {"USE_FP8": True}),
  "llama_lora": ("SyntheticLLaMA7B", {"USE_LORA": True}),
}
COMMON = {
  "TOKENIZER": "character",
  "VOCAB_SIZE": 96,
  "MAX_SEQ_LEN": 32,
  "PERCORE_BATCH_SIZE": 1,
  "MAX_STEPS": 4,
  "LR_COS_WARMUP": 1,
  "FPROP_DTYPE": "float32",
  "CHECKPOINT_EVERY_N_STEPS": 2,
  "EVAL_INTERVAL_STEPS": 2,
  "SUMMARY_INTERVAL_STEPS": 1,
  "DATA_PATH": TEXT.name,
}


def make(name: str, folder: pathlib.Path):
  """Makes one run and packs it."""
  size, knobs = RUNS[name]
  family = registry.find(size)
  options = {**COMMON, **knobs, "__module__": __name__}
  globals()[f"golden_{name}"] = type(f"golden_{name}", (datasets.LocalText, family), options)
  run = folder / name
  flags = [f"--fdl_config={__name__}.golden_{name}", "--fiddler=shrink()", "--fdl.model.dim=16"]
  flags += ["--fdl.model.stack.repeats=1"] * (name == "gemma3") + [f"--job_log_dir={run}"]
  assert main(["paxlike", *flags]) == 0
  shutil.rmtree(run / "checkpoints" / "checkpoint_00000004")
  shutil.rmtree(run / "summaries", ignore_errors=True)
  with tarfile.open(folder / f"{name}.tar.xz", "w:xz") as archive:
    archive.add(run, arcname=name)
  print(name, (folder / f"{name}.tar.xz").stat().st_size, flush=True)


if __name__ == "__main__":
  into = pathlib.Path(sys.argv[1]).absolute()
  into.mkdir(parents=True, exist_ok=True)
  os.chdir(TEXT.parent)  # DATA_PATH is the name of the file there.
  jax.config.update("jax_num_cpu_devices", 8)
  jax.config.update("jax_platforms", "cpu")
  sys.modules["make"] = sys.modules["__main__"]  # Where the program looks for the experiments.
  __name__ = "make"
  for one in sys.argv[2:] or RUNS:
    make(one, into)
