# SPDX-License-Identifier: Apache-2.0
"""Measures train steps on one GPU, beside those of torch.

    python benchmarks/gpu.py --suite=126m|5b|lora|sft --budget=SECONDS [--output=DIR] [--only=REGEX]

    126m  GPT 126M, bf16, beside a nanoGPT-style torch model; 16, 32 and 64 sequences of 2048
    5b    GPT 5B in bf16 and FP8, beside the same; 4 and 8 sequences of 2048
    lora  LLaMA-2 7B, rank 32 on all linear maps, beside transformers and peft; 1, 2 and 4 of 4096
    sft   LLaMA-2 7B in full in bf16 and FP8, beside transformers; 1, 2 and 4 sequences of 4096
    tiny  all of these so small that a CPU does

Every case is a process with a deadline. Ours is the step that `paxlike` would run, on random tokens
that are on the device; it goes before and after its peer, so that a drift of the machine shows.
Both sides hold weights and moments in the same dtypes, which the table names: float32 for GPT,
bfloat16 for what is trained of LLaMA. The peers of LLaMA have the kernels of Liger in rows of their
own, if these are installed; that was never run on a GPU. A case whose turn comes with too little of
the budget left is skipped, and --only names the cases of another call. Results are appended to
DIR/results.jsonl as they come; DIR has also table.md, log.txt with all that the cases wrote, and
the programs of our side (*.hlo.gz).

It runs from the checkout. A machine with JAX, Flax, Optax and, for the peers, torch, transformers
and peft lacks two distributions, and the third for Liger: carry them as wheels, for Python 3.12,

    pip download --no-deps --only-binary=:all: --python-version=3.12 \\
      --platform=manylinux_2_28_x86_64 --platform=manylinux_2_17_x86_64 \\
      fiddle libcst liger-kernel

Exits with 1 if a case failed, with 2 if there is no GPU or a flag is wrong.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NoReturn

import gpu_suites
import gpu_table

HERE = pathlib.Path(__file__).resolve().parent
# What is left of the budget for the table.
RESERVED_SECONDS = 3
# Of one case, so that one that hangs does not take the others' time.
MOST_SECONDS = 300


def main() -> int:
  options = _options()
  output = options.output or pathlib.Path("runs") / f"gpu-{options.suite}"
  output.mkdir(parents=True, exist_ok=True)
  cases = [case for case in gpu_suites.SUITES[options.suite] if re.search(options.only, case.name)]
  models = {
    name: dataclasses.asdict(gpu_suites.MODELS[name])
    for name in dict.fromkeys(case.model for case in cases if case.model)
  }
  with tempfile.TemporaryDirectory() as cache:
    bench = Bench(output, options.budget, pathlib.Path(cache))
    told = bench.ask("gpu_experiment.py", stdin=json.dumps(models), seconds=options.budget)
    if "failed" in told:
      print(f"gpu.py: {told['failed']}", file=sys.stderr)
      return 1
    is_gpu = told["platform"] in ("gpu", "cuda")
    if not is_gpu and options.suite != "tiny":
      _refuse(f"--suite={options.suite} needs a GPU: JAX finds a {told['device']}.")
    results = [bench.run(case, models, told, gpu=is_gpu) for case in cases]
  text = gpu_table.table(results)
  (output / "table.md").write_text(text)
  print(text)
  return int(any("failed" in result for result in results))


def _options() -> Any:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--suite", choices=gpu_suites.SUITES, required=True)
  parser.add_argument("--budget", type=float, required=True, help="seconds for all cases")
  parser.add_argument("--output", type=pathlib.Path, help="default: runs/gpu-SUITE")
  parser.add_argument("--only", default="", help="cases whose names have this pattern")
  options = parser.parse_args()
  if not 0 < options.budget < math.inf:
    _refuse(f"--budget={options.budget:g}: expected seconds, more than 0.")
  names = [case.name for case in gpu_suites.SUITES[options.suite]]
  try:
    found = any(re.search(options.only, name) for name in names)
  except re.error as error:
    _refuse(f"--only={options.only}: no pattern: {error}.")
  if not found:
    _refuse(f"--only={options.only}: none of {', '.join(names)}.")
  return options


def _refuse(why: str) -> NoReturn:
  print(f"gpu.py: {why}", file=sys.stderr)
  sys.exit(2)


class Bench:
  """Runs cases within a budget, and keeps what comes of them."""

  def __init__(self, output: pathlib.Path, budget: float, cache: pathlib.Path):
    """`cache` is where our side keeps programs: its second turn need not compile them again."""
    self._output, self._cache = output, cache
    self._ends = time.monotonic() + budget
    self._failed: set[tuple[str, str, int, str]] = set()

  @property
  def left(self) -> float:
    """Seconds of the budget."""
    return self._ends - time.monotonic() - RESERVED_SECONDS

  def run(
    self, case: gpu_suites.Case, models: dict[str, Any], told: dict[str, Any], *, gpu: bool
  ) -> gpu_table.Result:
    """Runs a case unless it is in vain; returns its result, which is in the file by then."""
    result: gpu_table.Result = {"case": case.name, **dataclasses.asdict(case)}
    kind = (case.side, case.model, case.batch, case.mode)
    if kind in self._failed:
      result["skipped"] = "it failed before"
    elif case.side == "torch_liger" and importlib.util.find_spec("liger_kernel") is None:
      result["skipped"] = "liger-kernel is not installed"
    elif self.left < case.least:
      result["skipped"] = f"needs {case.least:.0f} s, {max(self.left, 0):.0f} s are left"
    else:
      facts = told["models"].get(case.model, {})
      seconds = min(self.left, MOST_SECONDS)
      task = {
        "case": dataclasses.asdict(case),
        "model": models.get(case.model, {}),
        "facts": facts,
        "gpu": gpu,
        "seconds": seconds,
        "output": str(self._output.resolve()),
      }
      environment = self._environment(case.side, gpu=gpu)
      began = time.monotonic()
      result |= self.ask(
        f"{case.side}.py", json.dumps(task), seconds=seconds, environment=environment
      )
      result["process_seconds"] = time.monotonic() - began
      if "failed" in result:
        self._failed.add(kind)
      elif case.model:
        result |= gpu_table.derived(result, facts, told["flops"])
    with (self._output / "results.jsonl").open("a") as file:
      file.write(json.dumps(result) + "\n")
    print(_line(result), flush=True)
    return result

  def ask(
    self,
    script: str,
    *arguments: str,
    seconds: float,
    stdin: str = "",
    environment: dict[str, str] | None = None,
  ) -> dict[str, Any]:
    """Returns the JSON of the last line that a script prints, or {"failed": why}."""
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    given = environment if environment is not None else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen(
      [sys.executable, str(HERE / script), *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      # A group of its own: torch compiles in further processes.
      start_new_session=True,
      env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": _first_gpu()} | given,
    )
    end = ""
    try:
      told, errors = process.communicate(stdin, timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
      _end(process)
      told, errors = process.communicate()
      end = f"it was not done after {seconds:.0f} s"
    except KeyboardInterrupt:
      _end(process)
      raise
    with (self._output / "log.txt").open("a") as file:
      file.write(f"== {script} {' '.join(arguments)[:200]}\n{told}{errors}\n")
    answers = [line for line in told.splitlines() if line.startswith("{")]
    if process.returncode or not answers:
      end = end or f"exit status {process.returncode}"
      return {"failed": f"{end}: {_reason(errors)}"}
    return json.loads(answers[-1])

  def _environment(self, side: str, *, gpu: bool) -> dict[str, str]:
    if side.startswith("torch"):
      return {}
    return {
      "JAX_PLATFORMS": "cuda" if gpu else "cpu",
      "JAX_COMPILATION_CACHE_DIR": str(self._cache),
      # The error is to be the last that a process tells.
      "JAX_TRACEBACK_FILTERING": "off",
    }


def _first_gpu() -> str:
  return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _end(process: subprocess.Popen):
  """Kills a process and those that it began."""
  os.killpg(process.pid, signal.SIGKILL)


def _reason(errors: str) -> str:
  """Returns the line in which a process told its error, or the last."""
  lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["it told nothing"]
  raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
  return (raised or lines)[-1][:300]


def _line(result: gpu_table.Result) -> str:
  """Returns what is told of a case as soon as it is over."""
  for word in ("failed", "skipped"):
    if word in result:
      return f"{result['case']}: {word}: {result[word]}"
  told = "; ".join(result["warnings"])
  rate = (
    f"{result['tokens_per_second']:,.0f} tokens/s"
    if "groups" in result and result["model"]
    else "done"
  )
  return f"{result['case']}: {rate} in {result['process_seconds']:.0f} s{told and f' ({told})'}"


if __name__ == "__main__":
  sys.exit(main())
