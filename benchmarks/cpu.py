# SPDX-License-Identifier: Apache-2.0
"""Measures train steps on a CPU beside those of PyTorch, plain JAX and MaxText.

    python benchmarks/cpu.py [WORK ...] [--steps=20] [--cores=N] [--python=PATH]
      [--maxtext_python=PATH]

WORK is one of those below; without any, all are measured. Each side is a process of its own; they
take a step in turn, and only one runs at a time. A step includes its batch, which only paxlike and
plain JAX make anew each time. Prints a JSON line for each side, and a table of each work.
CPU-seconds are of all threads; ratios are the medians over the turns of CPU-seconds to those of
paxlike. Needs Linux.

PyTorch's models are nanoGPT's GPT-2 and transformers' LLaMA and Mixtral; AdamW is fused, and in
bfloat16 float32 weights are cast by autocast. Only paxlike computes a balance loss of experts.
--python measures paxlike beside itself in a second environment, such as one of another JAX. MaxText
has a part in gpt-f32 alone; it wants Python 3.12 and an environment of its own:

    python3.12 -m venv DIR && DIR/bin/pip install 'maxtext[tpu]==0.2.5'
    python benchmarks/cpu.py gpt-f32 --maxtext_python=DIR/bin/python

It has no extra for CPUs; that for TPUs runs on one. It is stopped (SIGSTOP) while others run, and
its steps are told by its log lines. Its embedding is drawn with another deviation, so its loss
begins somewhat above ln(vocabulary), where the others begin.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
from typing import Any, NamedTuple

from cpu_sides import MaxText, Turn, Worker
from plain_gpt import SIZES

_ALL: dict[str, Any] = {
  "LR_SCHEDULE": "constant",
  "LEARNING_RATE": 1e-3,
  "USE_REPEATED_LAYER": False,
  "CHECKPOINT_POLICY": "SAVE_EVERYTHING",
}
GPT = _ALL | {
  "NUM_LAYERS": SIZES.layers,
  "MODEL_DIMS": SIZES.model,
  "HIDDEN_DIMS": SIZES.ffn,
  "NUM_HEADS": SIZES.heads,
  "DIMS_PER_HEAD": SIZES.head,
  "VOCAB_SIZE": SIZES.vocab,
  "MAX_SEQ_LEN": SIZES.time,
  "PERCORE_BATCH_SIZE": SIZES.batch,
}
LLAMA = _ALL | {
  "NUM_LAYERS": 6,
  "MODEL_DIMS": 512,
  "HIDDEN_DIMS": 1376,
  "NUM_HEADS": 8,
  "VOCAB_SIZE": 8192,
  "MAX_SEQ_LEN": 1024,
  "PERCORE_BATCH_SIZE": 2,
}
MOE = _ALL | {
  "NUM_LAYERS": 4,
  "MODEL_DIMS": 256,
  "HIDDEN_DIMS": 512,
  "NUM_HEADS": 4,
  "NUM_KV_HEADS": 4,
  "VOCAB_SIZE": 8192,
  "MAX_SEQ_LEN": 256,
  "PERCORE_BATCH_SIZE": 8,
}
MAXTEXT = [
  f"base_num_decoder_layers={SIZES.layers}",
  f"base_emb_dim={SIZES.model}",
  f"base_mlp_dim={SIZES.ffn}",
  f"base_num_query_heads={SIZES.heads}",
  f"base_num_kv_heads={SIZES.heads}",
  f"head_dim={SIZES.head}",
  f"vocab_size={SIZES.vocab}",
  f"max_target_length={SIZES.time}",
  f"trainable_position_size={SIZES.time}",
  f"per_device_batch_size={SIZES.batch}",
  *("dtype=float32", "weight_dtype=float32"),
  # The model of its gpt3-52k.
  *("decoder_block=gpt3", "mlp_activations=[gelu]", "fused_qkv=true", "attention=dot_product"),
  *("logits_via_embedding=true", "normalization_layer_epsilon=1.e-5", "enable_dropout=false"),
  *("opt_type=adamw", "gradient_clipping_threshold=1.0"),
  *("scan_layers=false", "remat_policy=none"),
  *("hardware=cpu", "skip_jax_distributed_system=true", "dataset_type=synthetic"),
  *("enable_checkpointing=false", "enable_tensorboard=false", "enable_goodput_recording=false"),
]


class Work(NamedTuple):
  """What is trained.

  Attributes:
    experiment: Its registered name.
    knobs: KNOB -> value.
    peer: The script that has the same model in PyTorch.
    dtype: Of activations.
    sides: Other kinds of benchmarks/cpu_worker.py.
  """

  experiment: str
  knobs: dict[str, Any]
  peer: str
  dtype: str = "float32"
  sides: tuple[str, ...] = ("torch", "torch.compile")


WORKS = {
  "gpt-f32": Work("Synthetic126M", GPT, "torch_gpt", sides=("plain", "torch", "torch.compile")),
  "gpt-bf16": Work("Synthetic126M", GPT, "torch_gpt", "bfloat16"),
  "llama-f32": Work("SyntheticLLaMA7B", LLAMA, "torch_llama"),
  "llama-bf16": Work("SyntheticLLaMA7B", LLAMA, "torch_llama", "bfloat16"),
  "moe-f32": Work("Mixtral8x7B", MOE, "torch_llama", sides=("torch",)),
  "moe-bf16": Work("Mixtral8x7B", MOE, "torch_llama", "bfloat16", sides=("torch",)),
}


def check(sides: dict[str, Any]):
  """Raises SystemExit unless all train as many parameters and begin at the loss of guessing.

  MaxText tells its parameters in billions only, and its loss begins elsewhere.
  """
  facts = sides["paxlike"].facts
  for name, side in sides.items():
    if name == "maxtext":
      continue
    if side.facts["trained"] != facts["trained"]:
      raise SystemExit(
        f"cpu.py: {name} trains {side.facts['trained']} parameters, not {facts['trained']}."
      )
    if abs(side.facts["first_loss"] - math.log(facts["vocab"])) > 0.3:
      raise SystemExit(
        f"cpu.py: {name} begins at {side.facts['first_loss']}, not {math.log(facts['vocab']):.3f}."
      )


def report(work: str, turns: dict[str, list[Turn]], sides: dict[str, Any]):
  """Prints the lines and the table."""
  cores = len(os.sched_getaffinity(0))
  rows = [f"| {work} | CPU-seconds a step (median) | seconds a step | CPU ratio |"]
  rows.append("|---|---:|---:|---:|")
  for name, own in turns.items():
    ratios = [a.cpu / b.cpu for a, b in zip(own, turns["paxlike"], strict=True)]
    cpu, wall = (statistics.median(turn[field] for turn in own) for field in (1, 0))
    ratio = statistics.median(ratios)
    values = {
      "benchmark": "cpu",
      "work": work,
      "side": name,
      "steps": len(own),
      "cores": cores,
      **sides[name].facts,
    }
    values |= {"step_cpu_seconds": round(cpu, 4), "step_seconds": round(wall, 4)}
    values |= {"cpu_ratio_to_paxlike": round(ratio, 3), "last_loss": round(own[-1].loss, 4)}
    print(json.dumps(values))
    rows.append(f"| {name} | {cpu:.3f} | {wall:.3f} | {ratio:.2f} |")
  print("\n".join(["", *rows, ""]), flush=True)


def measure(name: str, options: argparse.Namespace):
  """Measures a work."""
  work = WORKS[name]
  knobs = work.knobs | {"FPROP_DTYPE": work.dtype}
  task: dict[str, Any] = {"experiment": work.experiment, "knobs": knobs, "peer": work.peer}
  with contextlib.ExitStack() as stack:
    sides: dict[str, Any] = {"paxlike": stack.enter_context(Worker("paxlike", task))}
    task |= {"facts": sides["paxlike"].facts, "casts": work.dtype == "bfloat16"}
    if options.python:
      other = stack.enter_context(Worker("paxlike", task, python=options.python))
      sides[f"paxlike, JAX {other.facts['jax']}"] = other
    for kind in work.sides:
      sides[kind] = stack.enter_context(Worker(kind, task))
    check(sides)
    if options.maxtext_python and name == "gpt-f32":
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      settings = [*MAXTEXT, *options.maxtext_flag]
      maxtext = MaxText(options.maxtext_python, settings, num_steps=options.steps, folder=folder)
      sides["maxtext"] = stack.enter_context(maxtext)
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for _ in range(options.steps):
      for side, process in sides.items():
        turns[side].append(process.turn())
    report(name, turns, sides)


def main():
  parser = argparse.ArgumentParser(description="Measures train steps on a CPU beside others.")
  parser.add_argument("works", nargs="*", metavar="WORK", help=", ".join(WORKS))
  parser.add_argument("--steps", type=int, default=20, help="of each side (default 20)")
  parser.add_argument("--cores", type=int, help="that all sides may use (default all)")
  parser.add_argument("--python", help="of a second environment with paxlike")
  parser.add_argument("--maxtext_python", help="of an environment with MaxText")
  parser.add_argument("--maxtext_flag", action="append", default=[], help="KEY=VALUE for MaxText")
  options = parser.parse_args()
  if unknown := set(options.works) - set(WORKS):
    sys.exit(f"cpu.py: unknown {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}.")
  if options.cores:
    # Processes inherit it, and make as many threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
  for name in options.works or WORKS:
    measure(name, options)


if __name__ == "__main__":
  main()
