# SPDX-License-Identifier: Apache-2.0
"""Teaches the model of `make train` a made task, in full and by LoRA of rank 8 (also QLoRA).

Ten animals have ten colours; which animal stands among other words is to be told by its colour:

    python benchmarks/finetune.py runs/tiny_python

prints, for each way, the share of 500 unseen prompts that are answered rightly, the bytes of its
checkpoint, and by how much quantized weights are off.
"""

import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

from paxlike.data.seqio import python_corpus
from paxlike.experiments import datasets
from paxlike.experiments.tiny import TinyPython

ANIMALS = ("cat", "dog", "horse", "bird", "fish", "mouse", "snake", "whale", "tiger", "camel")
COLOURS = ("red", "blue", "green", "white", "black", "brown", "pink", "grey", "gold", "violet")
OTHERS = ("import", "return", "class", "def", "yield", "lambda", "while", "raise", "assert")
LORA = {
  "USE_LORA": True,
  "LORA_RANK": 8,
  "LORA_ALPHA": 32.0,
  "LORA_TARGET_LAYERS": "query,key,value,output,down",
  "LEARNING_RATE": 5e-3,
}


class Tuned(datasets.Jsonl, TinyPython):
  """TinyPython on prompts with completions."""

  TOKENIZER = "sentencepiece"
  LEARNING_RATE = 1e-3
  MAX_STEPS = 300
  EVAL_INTERVAL_STEPS = 0
  SAMPLE_PROMPT = None


def question() -> dict[str, str]:
  """Returns a prompt and its completion."""
  number = random.randrange(len(ANIMALS))
  words: list[str] = random.choices(OTHERS, k=6)
  words.insert(random.randrange(7), ANIMALS[number])
  return {"prompt": f"# {' '.join(words)} ->", "completion": f" {COLOURS[number]}"}


def main():
  """Runs each way and prints what came of it."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("base", type=pathlib.Path, help="the folder of a run of TinyPython")
  base = parser.parse_args().base.absolute()
  random.seed(0)
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    for name, count in (("train", 4000), ("test", 500)):
      lines = (json.dumps(question()) + "\n" for _ in range(count))
      (folder / f"{name}.jsonl").write_text("".join(lines))
    knobs = {
      "VOCAB_PATH": python_corpus.vocabulary_file(),
      "DATA_PATH": folder / "train.jsonl",
      "EVAL_DATA_PATH": folder / "test.jsonl",
      "CHECKPOINT_RESTORE_PATH": base,
    }
    ways = {"untrained": {"MAX_STEPS": 0}, "full": {}, "lora": LORA}
    ways |= {kind: LORA | {"LORA_BASE_QUANTIZATION": kind} for kind in ("int8", "nf4")}
    for name, more in ways.items():
      flags = [f"--fdl.{knob}={value}" for knob, value in (knobs | more).items()]
      flags += [f"--job_log_dir={folder / name}", "--fdl_config=finetune.Tuned"]
      if name == "untrained":
        flags.append("--mode=eval")
      report(folder / name, name, flags)


def report(folder: pathlib.Path, name: str, flags: list[str]):
  """Runs the program and prints a line of JSON."""
  command = [sys.executable, "-m", "paxlike.main", *flags]
  here = pathlib.Path(__file__).parent
  paths = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
  environment = os.environ | {"PYTHONPATH": paths}
  done = subprocess.run(
    command, cwd=here, env=environment, check=True, stdout=subprocess.PIPE, text=True
  )
  (result,) = (folder / "eval_out" / "validation").glob("*.json")
  found = json.loads(result.read_text())
  files = (folder / "checkpoints").rglob("*")
  size = sum(path.stat().st_size for path in files if path.is_file())
  score = {"acc_strict": found["acc_strict"], "log_pplx": round(found["log_pplx"], 3)}
  if off := re.search(r"quantized weights .* off by ([\d.]+%)", done.stdout):
    score["off"] = off[1]
  print(json.dumps({"way": name, **score, "checkpoint_bytes": size}), flush=True)


if __name__ == "__main__":
  main()
