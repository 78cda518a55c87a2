# SPDX-License-Identifier: Apache-2.0
"""Measures a train step on a CPU beside those of PyTorch and MaxText.

    python benchmarks/cpu.py [--steps=20] [--cores=N] [--maxtext_python=PATH]

One GPT for all: 4 layers, 256 dims, 8 sequences of 256 tokens, 5,322,240 parameters, float32,
AdamW after clipping. Each side is a process of its own; they take a step in turn, and only one
runs at a time. A step includes its batch, which MaxText alone makes once. Prints one JSON line for
each side, and a table. CPU-seconds are of all threads; the ratio is the median over the turns of
CPU-seconds to those of paxlike. Needs Linux.

MaxText wants Python 3.12 and an environment of its own:

    python3.12 -m venv DIR && DIR/bin/pip install 'maxtext[tpu]==0.2.5'
    python benchmarks/cpu.py --maxtext_python=DIR/bin/python

It has no extra for CPUs; that for TPUs runs on one. It is stopped (SIGSTOP) while others run, and
its steps are told by its log lines. Its embedding is drawn with another deviation, so its loss
begins somewhat above ln(vocabulary), where the others begin.

PyTorch is told by OMP_WAIT_POLICY=PASSIVE to sleep where its threads wait for each other: spinning,
its way, doubles its CPU-seconds on a machine that others use too.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple, Self

from plain_gpt import SIZES

WARM_UP_STEPS = 4
OURS = (
  f"--fdl.NUM_LAYERS={SIZES.layers}",
  f"--fdl.MODEL_DIMS={SIZES.model}",
  f"--fdl.HIDDEN_DIMS={SIZES.ffn}",
  f"--fdl.NUM_HEADS={SIZES.heads}",
  f"--fdl.DIMS_PER_HEAD={SIZES.head}",
  f"--fdl.VOCAB_SIZE={SIZES.vocab}",
  f"--fdl.MAX_SEQ_LEN={SIZES.time}",
  f"--fdl.PERCORE_BATCH_SIZE={SIZES.batch}",
  "--fdl.FPROP_DTYPE=float32",
)
MAXTEXT = (
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
)


class Turn(NamedTuple):
  """What one step took, in seconds of the clock and of all threads."""

  wall: float
  cpu: float
  loss: float


class Worker:
  """A side that this file runs, in another process."""

  def __init__(self, name: str):
    self._name = name
    command = [sys.executable, __file__, f"--worker={name}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_WAIT_POLICY": "PASSIVE"}
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    self.facts: dict[str, Any] = self._read()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    self._process.communicate()

  def turn(self) -> Turn:
    """Takes one step."""
    assert self._process.stdin is not None
    print("step", file=self._process.stdin, flush=True)
    return Turn(**self._read())

  def _read(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(f"cpu.py: the process of {self._name} has failed.")
    return json.loads(line)


class MaxText:
  """MaxText's own program, held still outside its turns."""

  def __init__(self, python: str, *, num_steps: int, folder: str, flags: list[str]):
    name = "maxtext.trainers.pre_train.train"
    # It computes ahead of its log, so that what follows the last line must not be its end.
    settings = [f"steps={num_steps + 4}", "run_name=cpu", f"base_output_directory={folder}"]
    self._process = subprocess.Popen(
      [python, "-m", name, *MAXTEXT, *settings, *flags],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      cwd=folder,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"},
    )
    script = "import importlib.metadata as m; print(m.version('maxtext'), m.version('jax'))"
    versions = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    maxtext, jax = versions.stdout.split()
    self.facts = {"maxtext": maxtext, "jax": jax, "first_loss": self._line()}
    for _ in range(WARM_UP_STEPS):
      self._line()
    self._process.send_signal(signal.SIGSTOP)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    self._process.kill()
    self._process.communicate()

  def turn(self) -> Turn:
    """Lets it run until it tells of one more step."""
    wall, cpu = time.perf_counter(), self._cpu_seconds()
    self._process.send_signal(signal.SIGCONT)
    loss = self._line()
    self._process.send_signal(signal.SIGSTOP)
    return Turn(time.perf_counter() - wall, self._cpu_seconds() - cpu, loss)

  def _cpu_seconds(self) -> float:
    stat = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

  def _line(self) -> float:
    """Waits for the log line of a step, and returns its loss."""
    assert self._process.stdout is not None
    tail = collections.deque(maxlen=10)
    for line in self._process.stdout:
      if "completed step:" in line:
        return float(line.split(" loss: ")[1].split(",")[0])
      tail.append(line)
    raise SystemExit(f"cpu.py: MaxText has failed:\n{''.join(tail)}")


def work(name: str):
  """Takes a step for each line of the input, as `Worker` asks, and tells what it took."""
  facts: dict[str, Any]
  if name == "paxlike":
    import experiments
    import jax
    import step as step_lib

    _, trainer = experiments.build("Synthetic126M", OURS)
    with (
      jax.set_mesh(trainer.devices),
      trainer.data.batches(trainer.batch_size, rows=trainer.placer.rows) as batches,
    ):
      facts = {"jax": jax.__version__, "parameters": trainer.definition.num_params}
      answer(step_lib.Step(trainer, batches), facts)
  else:
    import torch
    from torch_cpu import TorchGpt

    gpt = TorchGpt(SIZES, compiled=name == "torch.compile")
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    answer(gpt.step, facts | {"parameters": gpt.num_parameters})


def answer(step: Any, facts: dict[str, Any]):
  """Warms up, tells `facts`, and takes a step for each line of the input."""
  facts["first_loss"] = round(step(), 4)
  for _ in range(WARM_UP_STEPS):
    step()
  print(json.dumps(facts), flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    turn = Turn(time.perf_counter() - wall, time.process_time() - cpu, loss)
    print(json.dumps(turn._asdict()), flush=True)


def check(sides: dict[str, Any]):
  """Raises SystemExit unless all have as many parameters and begin at the loss of guessing.

  MaxText tells its parameters in billions only, and its loss begins elsewhere.
  """
  count = sides["paxlike"].facts["parameters"]
  guessing = math.log(SIZES.vocab)
  for name, side in sides.items():
    if name == "maxtext":
      continue
    if side.facts["parameters"] != count:
      raise SystemExit(f"cpu.py: {name} has {side.facts['parameters']} parameters, not {count}.")
    if abs(side.facts["first_loss"] - guessing) > 0.15:
      raise SystemExit(f"cpu.py: {name} begins at {side.facts['first_loss']}, not {guessing:.3f}.")


def report(turns: dict[str, list[Turn]], sides: dict[str, Any]):
  """Prints the lines and the table."""
  cores = len(os.sched_getaffinity(0))
  rows = ["| | CPU-seconds a step (median) | seconds a step | CPU ratio |", "|---|---:|---:|---:|"]
  for name, own in turns.items():
    ratios = [a.cpu / b.cpu for a, b in zip(own, turns["paxlike"], strict=True)]
    cpu, wall = (statistics.median(turn[field] for turn in own) for field in (1, 0))
    ratio = statistics.median(ratios)
    values = {
      "benchmark": "cpu",
      "side": name,
      "steps": len(own),
      "cores": cores,
      **sides[name].facts,
    }
    values |= {"step_cpu_seconds": round(cpu, 4), "step_seconds": round(wall, 4)}
    values |= {"cpu_ratio_to_paxlike": round(ratio, 3), "last_loss": round(own[-1].loss, 4)}
    print(json.dumps(values))
    rows.append(f"| {name} | {cpu:.3f} | {wall:.3f} | {ratio:.2f} |")
  print("\n".join(["", *rows]))


def main():
  parser = argparse.ArgumentParser(description="Measures a train step on a CPU beside others.")
  parser.add_argument("--steps", type=int, default=20, help="of each side (default 20)")
  parser.add_argument("--cores", type=int, help="that all sides may use (default all)")
  parser.add_argument("--maxtext_python", help="of an environment with MaxText")
  parser.add_argument("--maxtext_flag", action="append", default=[], help="KEY=VALUE for MaxText")
  parser.add_argument("--no_compile", action="store_true", help="leaves torch.compile out")
  parser.add_argument("--worker", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.worker:
    work(options.worker)
    return
  if options.cores:
    # Processes inherit it, and make as many threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
  names = ["paxlike", "torch", *([] if options.no_compile else ["torch.compile"])]
  with contextlib.ExitStack() as stack:
    sides: dict[str, Any] = {name: stack.enter_context(Worker(name)) for name in names}
    check(sides)
    if options.maxtext_python:
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      maxtext = MaxText(
        options.maxtext_python,
        num_steps=options.steps + WARM_UP_STEPS + 1,
        folder=folder,
        flags=options.maxtext_flag,
      )
      sides["maxtext"] = stack.enter_context(maxtext)
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for _ in range(options.steps):
      for name, side in sides.items():
        turns[name].append(side.turn())
    report(turns, sides)


if __name__ == "__main__":
  main()
