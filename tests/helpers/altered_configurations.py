# SPDX-License-Identifier: Apache-2.0
"""Alters a key of a configuration at a time, and compares transformers' model with the conversion.

    PYTHONPATH=tests python -m helpers.altered_configurations [-v] [FAMILY ...]

prints the table of docs/trust.md. A case is a tiny model that transformers makes of the altered
configuration. It matches, is refused in one line, or is silently wrong; where transformers itself
has no such model, there is nothing to compare with.
"""

import collections
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from helpers import altered_cases

TOKENS = np.random.default_rng(0).integers(3, 60, (2, 24)).astype(np.int32)
TOLERANCE = 2e-4
# By which transformers, too, refuses what it has not.
_ERRORS = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  LookupError,
  NotImplementedError,
  OSError,
  RuntimeError,
  TypeError,
  ValueError,
)


class Verdict(NamedTuple):
  """What came of a case.

  Attributes:
    kind: "match", "refused", "wrong", "crash", or "none": transformers has no such model.
    reason: Of a refusal, or how large the error is.
  """

  kind: str
  reason: str = ""


def truth(folder: pathlib.Path, config: Mapping[str, Any]) -> np.ndarray | None:
  """Saves transformers' model of a configuration and returns its logits; None: there is none."""
  import torch
  import transformers
  from huggingface_hub.errors import StrictDataclassError

  path = folder / "config.json"
  path.write_text(json.dumps(config))
  torch.set_num_threads(1)  # Of so small matmuls, waiting for each other would take most time.
  torch.manual_seed(0)
  try:
    made = transformers.AutoConfig.from_pretrained(folder)
    made._attn_implementation = "eager"
    for part in (made, getattr(made, "text_config", None)):
      if part is not None:
        part.dtype = torch.float32
        part.return_dict = True
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval().float()
    with torch.no_grad():
      for parameter in model.parameters():
        # As drawn, norms are all the same and biases are nothing.
        parameter.add_(0.1 * torch.randn_like(parameter))
      logits = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    model.save_pretrained(folder)
  except (*_ERRORS, StrictDataclassError):
    return None
  path.write_text(json.dumps(config))
  return logits if np.isfinite(logits).all() else None


@functools.cache
def _forward(text: str) -> Any:
  """Returns the definition and compiled forward pass of a graph's text."""
  import fiddle as fdl
  import jax

  from paxlike import fiddlers
  from paxlike.config import graph_file
  from paxlike.layers.decoder import forward
  from paxlike.layers.module import Definition

  model: Any = graph_file.load(text)
  fiddlers.precision(model, "float32")
  definition = Definition(cast(Any, fdl.build(model)))
  return jax.jit(functools.partial(forward, definition))


def conversion(folder: pathlib.Path) -> np.ndarray:
  """Returns the logits of the converted model.

  Raises:
    UserError: It is refused.
  """
  from paxlike.config import graph_file
  from paxlike.convert.importing import Source

  source = Source.hugging_face(folder)
  source._check_copies()
  params = {
    name.removeprefix("params."): np.asarray(value, np.float32) for name, value in source._weights()
  }
  run = _forward(graph_file.dump(source._with_data(None).trainer().model))
  return np.asarray(run(params, {"inputs": TOKENS})[0])


def judge(case: altered_cases.Case) -> Verdict:
  """Returns what comes of a case."""
  from paxlike.errors import UserError

  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    config = altered_cases.altered(case)
    expected = truth(folder, config)
    if expected is None:
      return Verdict("none")
    try:
      got = conversion(folder)
    except UserError as error:
      reason = str(error)
      return Verdict("refused" if "\n" not in reason else "crash", reason)
    except _ERRORS as error:
      return Verdict("crash", repr(error)[:300])
  if got.shape != expected.shape:
    return Verdict("wrong", f"{got.shape} {expected.shape}")
  error = float(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))
  return Verdict("match" if error < TOLERANCE else "wrong", f"{error:.1e}")


def main(families: list[str]) -> int:
  """Prints the table. Returns 1 if anything is silently wrong."""
  import logging

  import transformers

  # Compiling takes most time. Read when JAX first compiles.
  os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
  transformers.logging.set_verbosity(logging.CRITICAL)
  transformers.utils.logging.disable_progress_bar()
  counts: dict[str, collections.Counter[str]] = {}
  for family in families or list(altered_cases.BASES):
    counts[family] = collections.Counter()
    began = time.perf_counter()
    for case in altered_cases.cases(family):
      verdict = judge(case)
      counts[family][verdict.kind] += 1
      if verdict.kind in ("wrong", "crash") or "-v" in sys.argv:
        print(f"{verdict.kind}: {case}: {verdict.reason}", flush=True)
    print(f"{family}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
  kinds = ("match", "refused", "wrong", "crash", "none")
  print("| family | cases | match | refused | silently wrong | crash | not in transformers |")
  print("|---|---:|---:|---:|---:|---:|---:|")
  for family, count in [*counts.items(), ("all", sum(counts.values(), collections.Counter()))]:
    print(f"| {family} | {count.total()} | {' | '.join(str(count[kind]) for kind in kinds)} |")
  return int(any(count["wrong"] + count["crash"] for count in counts.values()))


if __name__ == "__main__":
  sys.exit(main([arg for arg in sys.argv[1:] if not arg.startswith("-")]))
