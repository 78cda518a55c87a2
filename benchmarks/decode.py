# SPDX-License-Identifier: Apache-2.0
"""Decodes many prompts at once, and beside it the same with transformers' `generate`.

    python benchmarks/decode.py MODEL [--sampled] [--end_token=ID] [--prompts=64] [--slots=64]
        [--new_tokens=200] [--batch=8] [--repeats=5] [--dtype=float32] [--quantize=SCHEME]

MODEL is a folder of Hugging Face, small enough for both. --dtype is that of both sides; --quantize
holds paxlike's weights in fewer bits, such as int8. Prompts are random tokens and decoding is
greedy, or with --sampled at temperature 1, ours as in reinforcement learning: with the training
forward pass, which draws each token again, for --batch sequences at a time, and gives its
log-probability. A text ends after --new_tokens or, with --end_token, after that token; transformers
decodes batches of --slots prompts, each until its last text has ended. Both sides do the same, in
turn, after one round that is not counted. Prints one JSON line; the tokens counted are those up to
the end of each text. Two devices of a CPU sample faster than one, which decodes on one core:
JAX_NUM_CPU_DEVICES=2.

Without --sampled it also tells at which share of the memory's bandwidth paxlike reads its weights,
once in each step: the median over the rounds. The bandwidth is that of a large float32 matrix times
a vector, measured after each round.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from paxlike import fiddlers
from paxlike.config import graph_file
from paxlike.convert.main import run as convert
from paxlike.devices import jax_setup
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.inference.generate import Generator
from paxlike.inference.request import Request
from paxlike.inference.sampling import Sampling
from paxlike.training import train_state
from paxlike.training.forward_backward import ForwardBackward
from paxlike.training.reinforcement.answers import Answer
from paxlike.training.reinforcement.drafts import Drafter
from paxlike.training.reinforcement.sampler import Sampler


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("model", type=pathlib.Path)
  parser.add_argument("--sampled", action="store_true")
  parser.add_argument("--end_token", type=int)
  parser.add_argument("--prompts", type=int, default=64)
  parser.add_argument("--slots", type=int, default=64)
  parser.add_argument("--prompt_tokens", type=int, default=8)
  parser.add_argument("--new_tokens", type=int, default=200)
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--quantize")
  options = parser.parse_args()
  jax_setup.set_up()  # The program's allocator, for both sides.
  vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
  shape = (options.prompts, options.prompt_tokens)
  prompts = np.random.default_rng(0).integers(3, vocab_size, shape).astype(np.int32)
  task = Task(prompts, options)
  ours = sampled(task) if options.sampled else Greedy(task)
  sides = {"paxlike": ours, "transformers": theirs(task)}
  texts = {name: decode() for name, decode in sides.items()}
  times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
  shares = []
  for _ in range(options.repeats):
    for name, decode in sides.items():
      times[name].append(timed(decode))
      if name == "paxlike" and isinstance(ours, Greedy):
        shares.append(ours.bandwidth_share())
  same = sum(a == b for a, b in zip(*texts.values(), strict=True))
  tokens = {name: sum(map(len, found)) for name, found in texts.items()}
  report: dict[str, Any] = {
    "benchmark": "sampled" if options.sampled else "decode",
    "versions": {m.__name__: m.__version__ for m in (jax, torch, transformers)},
    "prompts": options.prompts,
    "new_tokens": options.new_tokens,
    "same_texts": same,
  }
  for name, pairs in times.items():
    seconds, cpu_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    report[name] = {
      "tokens": tokens[name],
      "tokens_per_second": round(tokens[name] / seconds),
      "tokens_per_cpu_second": round(tokens[name] / cpu_seconds),
    }
  if shares:
    report["paxlike"]["bandwidth_share"] = round(statistics.median(shares), 2)
    report["paxlike"]["bandwidth_shares"] = [round(share, 2) for share in shares]
  share = tokens["paxlike"] / tokens["transformers"]
  ratios = [
    [share * b / a for a, b in zip(*pair, strict=True)]
    for pair in zip(times["paxlike"], times["transformers"], strict=True)
  ]
  for index, name in enumerate(("speed_ratio", "cpu_speed_ratio")):
    report[name] = round(statistics.median(ratio[index] for ratio in ratios), 2)
  print(json.dumps(report))


Texts = list[list[int]]


class Task(NamedTuple):
  """What both sides do; int32 prompts [count, size]."""

  prompts: np.ndarray
  options: argparse.Namespace

  @property
  def end_ids(self) -> tuple[int, ...]:
    """The tokens that end a text."""
    return () if self.options.end_token is None else (self.options.end_token,)


def timed(function: Callable[[], Any]) -> tuple[float, float]:
  """Returns the seconds and CPU-seconds of a call."""
  wall, cpu = time.perf_counter(), time.process_time()
  function()
  return time.perf_counter() - wall, time.process_time() - cpu


def loaded(options: argparse.Namespace) -> tuple[Any, Any]:
  """Returns (the trainer of a model of Hugging Face, its weights)."""
  with tempfile.TemporaryDirectory() as scratch:
    converted = pathlib.Path(scratch) / "model"
    assert convert(["--from=hf", f"--path={options.model}", f"--to={converted}"]) == 0
    graph = graph_file.read(converted / "config.json")
    fiddlers.precision(graph, options.dtype)
    fiddlers.decoding(graph)
    if options.quantize:
      fiddlers.quantize_weights(graph, options.quantize)
    trainer: Any = fdl.build(graph)
    return trainer, trainer.load(converted)


class Greedy:
  """Decodes with paxlike, greedily."""

  def __init__(self, task: Task):
    trainer, params = loaded(task.options)
    self._devices = trainer.devices
    self._slots = min(task.options.slots, len(task.prompts))
    (_, size), new_tokens = task.prompts.shape, task.options.new_tokens
    with jax.set_mesh(self._devices):
      self._generator = Generator(
        trainer.definition,
        params,
        num_rows=task.options.slots,
        max_len=size + new_tokens,
        end_ids=task.end_ids,
      )
    self._before = (0.0, 0)
    self._requests = [Request(tokens=tokens, max_new_tokens=new_tokens) for tokens in task.prompts]
    held, specs = trainer.definition.prepare(params), trainer.definition.weights
    read = jax.tree.leaves({name: held[name] for name in held if specs[name].matmul})
    self._bytes = sum(leaf.nbytes for leaf in read)

  def __call__(self) -> Texts:
    self._before = self._decoded()
    with jax.set_mesh(self._devices):
      texts = {
        text.request: text for grown in self._generator.run(self._requests) for text in grown
      }
    ends = {n: [] if text.end is None else [text.end[0]] for n, text in texts.items()}
    return [texts[n].tokens + ends[n] for n in sorted(texts)]

  def bandwidth_share(self) -> float:
    """Returns how fast the last call's steps read weights, over how fast memory can be read."""
    # A sum would wait for its own additions.
    x, w = jnp.ones((100, 1_000_000)), jnp.ones(1_000_000)
    jax.block_until_ready(x @ w)
    seconds = [timed(lambda: jax.block_until_ready(x @ w))[0] for _ in range(9)]
    (seconds_before, before), (seconds_after, after) = self._before, self._decoded()
    step = self._slots * (seconds_after - seconds_before) / (after - before)
    return self._bytes / step / (x.nbytes / statistics.median(seconds))

  def _decoded(self) -> tuple[float, int]:
    speed = self._generator.speed
    return speed.decode_seconds, speed.decode_tokens


def sampled(task: Task) -> Callable[[], Texts]:
  """Returns a function that samples with paxlike as reinforcement learning does."""
  trainer, params = loaded(task.options)
  (_, size), sampling = task.prompts.shape, Sampling(temperature=1.0)
  slots, new_tokens = task.options.slots, task.options.new_tokens
  passes = ForwardBackward(trainer.definition, trainer.optimizer, sampling=sampling)
  with jax.set_mesh(trainer.devices):
    of_model = trainer.definition, trainer.optimizer, trainer.devices
    prepared = passes.prepare(train_state.create(*of_model, seed=0, given=params))
    length = size + new_tokens - 1
    drafter = Drafter(
      trainer.definition,
      params,
      num_slots=slots,
      seq_len=length,
      end_ids=task.end_ids,
      sampling=sampling,
      phase="sample",
    )
  placer = BatchPlacer(trainer.devices, batch_size=task.options.batch, seq_len=length)
  sampler = Sampler(drafter, passes, placer, seq_len=length)

  def sample() -> Texts:
    rows = enumerate(task.prompts)
    answers = [Answer(prompt=row, max_tokens=new_tokens, seed=number) for number, row in rows]
    with jax.set_mesh(trainer.devices):
      sampler.sample(prepared, answers)
    return [answer.tokens for answer in answers]

  return sample


def theirs(task: Task) -> Callable[[], Texts]:
  """Returns a function that decodes with transformers."""
  model: Any = transformers.AutoModelForCausalLM.from_pretrained(
    task.options.model, dtype=getattr(torch, task.options.dtype)
  ).eval()
  tokens = torch.tensor(task.prompts, dtype=torch.long)
  given: dict[str, Any] = {"max_new_tokens": task.options.new_tokens, "pad_token_id": 0}
  given |= {"do_sample": True, "top_k": 0} if task.options.sampled else {"do_sample": False}
  given |= (
    {"eos_token_id": list(task.end_ids)}
    if task.end_ids
    else {"min_new_tokens": task.options.new_tokens}
  )

  def decode() -> Texts:
    texts = []
    for batch in tokens.split(task.options.slots):
      with torch.inference_mode():
        out = model.generate(batch, attention_mask=torch.ones_like(batch), **given)
      texts += [until_end(row.tolist()) for row in out[:, tokens.shape[1] :]]
    return texts

  def until_end(text: list[int]) -> list[int]:
    ends = [place for place, token in enumerate(text) if token in task.end_ids]
    return text[: ends[0] + 1] if ends else text

  return decode


if __name__ == "__main__":
  main()
