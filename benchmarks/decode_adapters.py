# SPDX-License-Identifier: Apache-2.0
"""Decodes one batch with several LoRA adapters, beside the same batch with a single one.

    python benchmarks/decode_adapters.py [--adapters=8] [--slots=32] [--new_tokens=64] [--repeats=9]

The model is a LLaMA of random weights, 6 layers of width 512, in float32, with random adapters of
rank 8 of all linear maps of its blocks. "base" has no adapters; "one" has one, which all decode
slots use; "several" has `--adapters`, which the slots use in turn. All do the same, in turn, after
one round that is not counted. Prints one JSON line: tokens per CPU-second (a busy machine disturbs
it less than tokens per second), and the medians of the ratios of both.
"""

import argparse
import functools
import json
import statistics
import time
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from paxlike import fiddlers, registry
from paxlike.devices.mesh import MeshSpec
from paxlike.inference.generate import Generator
from paxlike.inference.request import Request
from paxlike.layers import Definition
from paxlike.training import train_state

KNOBS: dict[str, Any] = {
  "VOCAB_SIZE": 8192,
  "MAX_SEQ_LEN": 512,
  "NUM_LAYERS": 6,
  "MODEL_DIMS": 512,
  "HIDDEN_DIMS": 1536,
  "NUM_HEADS": 8,
  "FPROP_DTYPE": "float32",
}
PROMPT_TOKENS = 8


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--adapters", type=int, default=8)
  parser.add_argument("--slots", type=int, default=32)
  parser.add_argument("--new_tokens", type=int, default=64)
  parser.add_argument("--repeats", type=int, default=9)
  options = parser.parse_args()
  counts = {"base": 0, "one": 1, "several": options.adapters}
  sides = {name: decoder(count, options) for name, count in counts.items()}
  rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
  for round_number in range(options.repeats + 1):
    for name, decode in sides.items():
      found = decode()
      if round_number:
        rates[name].append(found)
  report: dict[str, Any] = {"benchmark": "decode_adapters", "jax": jax.__version__}
  report |= {"device": jax.devices()[0].device_kind, **vars(options)}
  report |= {name: round(statistics.median(cpu for _, cpu in each)) for name, each in rates.items()}
  for below in ("one", "base"):
    pairs = list(zip(rates["several"], rates[below], strict=True))
    for index, kind in enumerate(("speed", "cpu_speed")):
      ratio = statistics.median(a[index] / b[index] for a, b in pairs)
      report[f"several_to_{below}_{kind}"] = round(ratio, 2)
  print(json.dumps(report))


def decoder(num_adapters: int, options: argparse.Namespace) -> Any:
  """Returns a function that decodes a batch and returns the decoded tokens per second."""
  graph = registry.find("SyntheticLLaMA7B")(**KNOBS).trainer()
  fiddlers.decoding(graph)
  if num_adapters:
    fiddlers.lora_bank(graph, rank=8, num_adapters=num_adapters, roles=["all"])
  model: Any = fdl.build(graph.model)
  definition = Definition(model)
  devices = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(definition, devices, seed=0)
  random = np.random.default_rng(0)
  for name in params:
    if name.endswith("lora.b"):
      params[name] = jax.numpy.asarray(0.01 * random.normal(size=params[name].shape), "float32")
  prompts = random.integers(3, KNOBS["VOCAB_SIZE"], (options.slots, PROMPT_TOKENS)).astype(np.int32)
  requests = [
    Request(
      tokens=tokens,
      max_new_tokens=options.new_tokens,
      adapter=number % num_adapters if num_adapters else -1,
    )
    for number, tokens in enumerate(prompts)
  ]
  length = PROMPT_TOKENS + options.new_tokens
  generator = Generator(definition, params, num_rows=options.slots, max_len=length)
  return functools.partial(rates_of, generator, requests)


def rates_of(generator: Generator, requests: list[Request]) -> tuple[float, float]:
  """Returns the new tokens of all requests per second and per CPU-second."""
  before = generator.speed.decode_tokens
  wall, cpu = time.perf_counter(), time.process_time()
  for _ in generator.run(requests):
    pass
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  tokens = generator.speed.decode_tokens - before
  return tokens / wall, tokens / cpu


if __name__ == "__main__":
  main()
