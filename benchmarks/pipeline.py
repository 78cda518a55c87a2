# SPDX-License-Identifier: Apache-2.0
"""What pipeline schedules cost: bubbles and stored groups of layers, and memory as compiled.

    python benchmarks/pipeline.py [--microbatches 4 8 16 32]

prints two tables. The first is arithmetic, of 8 stages and 64 microbatches. The second has the
temporary memory of a device, as the compiler tells it, of a step of a small GPT on 4 fake CPU
devices: a stage each, the same rows in every microbatch.
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import fiddle as fdl
import jax

from paxlike import registry
from paxlike.compilation import aot
from paxlike.layers.pipeline.schedules import Schedule
from paxlike.training.trainer import Trainer

STAGES = 4
# Schedule, groups of layers a stage, whether a group is computed again from its input.
CASES = (
  ("gpipe", 1, True),
  ("circular", 2, True),
  ("1f1b", 1, True),
  ("interleaved_1f1b", 2, True),
  ("1f1b", 1, False),
  ("interleaved_1f1b", 2, False),
)


def temporary_bytes(name: str, chunks: int, microbatches: int, *, recompute: bool) -> int:
  """Returns those of a device in a step of 8 layers of width 128, 1,024 tokens a microbatch."""
  knobs = {
    "NUM_LAYERS": 8,
    "MODEL_DIMS": 128,
    "NUM_HEADS": 4,
    "HIDDEN_DIMS": 512,
    "DIMS_PER_HEAD": 32,
    "VOCAB_SIZE": 512,
    "MAX_SEQ_LEN": 128,
    "FPROP_DTYPE": "float32",
    "PERCORE_BATCH_SIZE": 8 * microbatches / STAGES,
    "ICI_MESH_SHAPE": {"pipeline": STAGES},
    "PIPELINE_SCHEDULE": name,
    "NUM_VIRTUAL_STAGES": chunks,
    "NUM_MICROBATCHES": microbatches,
    "PIPELINE_RECOMPUTE": recompute,
  }
  trainer: Trainer = fdl.build(registry.find("Synthetic126M")(**knobs).trainer())
  return aot.compile_step(trainer).memory.temporaries


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16, 32])
  options = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", STAGES)
  print("| schedule | groups per stage | bubble | stored groups, first to last stage |")
  print("|---|---:|---:|---|")
  cases = [("gpipe", 1), ("1f1b", 1)]
  cases += [(name, chunks) for chunks in (2, 3) for name in ("circular", "interleaved_1f1b")]
  for name, chunks in cases:
    plan = Schedule(name=name, stages=8, chunks=chunks, microbatches=64)
    stored = " ".join(str(plan.stored(stage)) for stage in range(8))
    print(f"| {name} | {chunks} | {plan.bubble:.2%} | {stored} |")
  counts = options.microbatches
  print(f"\n| schedule | saved of a group | {' | '.join(f'{n} microbatches' for n in counts)} |")
  print(f"|---|---|{'---:|' * len(counts)}")
  for name, chunks, recompute in CASES:
    sizes = [temporary_bytes(name, chunks, n, recompute=recompute) / 2**20 for n in counts]
    kept = "its input" if recompute else "all"
    print(f"| {name} | {kept} | {' | '.join(f'{size:.1f} MiB' for size in sizes)} |", flush=True)


if __name__ == "__main__":
  main()
