# SPDX-License-Identifier: Apache-2.0
"""How far each family is from Hugging Face's model of the same weights: a table of docs/results.md.

PYTHONPATH=tests python -m helpers.parity [FAMILY ...]
"""

import contextlib
import copy
import inspect
import io
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from helpers.hf_families import FAMILIES
from helpers.hf_models import converted, logits, save_random
from paxlike import registry
from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder
from paxlike.layers.module import Definition


class Distance(NamedTuple):
  """The largest logit of Hugging Face's model, and the largest difference from it."""

  largest: float
  difference: float


def distance(theirs: Any, definition: Definition, params: dict[str, Any]) -> Distance:
  """Returns how far the logits of 2 x 24 random tokens are apart.

  Theirs are computed in float64, except for models of experts, whose matmuls in PyTorch do not take
  it. In float32, those of some families are off by more than ours, on some processors.
  """
  import torch

  tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
  with torch.no_grad():
    has_experts = any("expert" in name for name, _ in theirs.named_parameters())
    exact = theirs if has_experts else copy.deepcopy(theirs).double()
    expected = exact(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  found = logits(definition, params, tokens)
  return Distance(float(np.abs(expected).max()), float(np.abs(found - expected).max()))


def changed_by_the_way_back(folder: pathlib.Path) -> list[str]:
  """Returns the tensors of `theirs` that `ours`, converted back to `back`, has not bit for bit."""
  assert run(["--from=paxlike", f"--path={folder / 'ours'}", f"--to={folder / 'back'}"]) == 0
  before, after = TensorFolder(folder / "theirs"), TensorFolder(folder / "back")
  assert after.specs.keys() == before.specs.keys()
  return [x for x in before.specs if after.read(x).tobytes() != before.read(x).tobytes()]


def own_file(folder: pathlib.Path) -> tuple[str, int]:
  """Returns the file of the family of a converted model, and its number of lines."""
  kinds = type(registry.load(folder / "experiment.json")).__mro__
  kind = next(kind for kind in kinds if "hugging_face" in vars(kind))
  path = pathlib.Path(inspect.getsourcefile(kind) or "")
  return path.name, len(path.read_text().splitlines())


def main(names: Sequence[str]):
  print("| family | largest logit | largest difference | tensors back | changed | file, lines |")
  print("|---|---:|---:|---:|---:|---|")
  for name in names or FAMILIES:
    with tempfile.TemporaryDirectory() as scratch:
      folder = pathlib.Path(scratch)
      with contextlib.redirect_stdout(io.StringIO()):
        theirs = save_random(name, folder / "theirs")
        found = distance(theirs, *converted(folder / "theirs", folder / "ours"))
        changed = changed_by_the_way_back(folder)
      count = len(TensorFolder(folder / "theirs").specs)
      file, lines = own_file(folder / "ours")
    row = name, f"{found.largest:.2f}", f"{found.difference:.1e}", count, len(changed)
    print(f"| {' | '.join(map(str, row))} | `{file}`, {lines} |", flush=True)


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  main(sys.argv[1:])
