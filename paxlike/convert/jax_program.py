# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of other JAX programs have in common: folders of steps, and names."""

import os
import pathlib
import re
from typing import Any

from paxlike import untrusted_files
from paxlike.convert import tensorstore_arrays
from paxlike.errors import UserError
from paxlike.layers.decoder import Decoder


def find(
  path: pathlib.Path, step: int | None, *, program: str, item: str, pattern: str
) -> pathlib.Path:
  """Returns the folder of arrays of a checkpoint.

  Args:
    path: It, or the folder of the step, of all steps, or of the run (with `checkpoints`).
    step: The step; None: the newest.
    program: The program's name, for errors.
    item: The name of the folder of arrays in that of the step.
    pattern: The form (`re`) of the names of steps' folders, with the step as its group.

  Raises:
    UserError: There is none.
  """
  if not path.is_dir():
    raise UserError(f"--path={path} is not a folder.")
  if not tensorstore_arrays.is_at(path) and not (path / item).is_dir():
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    matches = [re.fullmatch(pattern, name) for name in os.listdir(folder)]
    steps = {int(match[1]): folder / match[0] for match in matches if match is not None}
    if not steps:
      raise UserError(
        f"--path={path} holds no checkpoint of {program}: name the folder of a run, of its"
        f" checkpoints, of one of them, or of its {item}."
      )
    if step is not None and step not in steps:
      shown = ", ".join(map(str, sorted(steps)[:20]))
      raise UserError(f"--step={step}: {folder} has the steps {shown}.")
    path = steps[max(steps) if step is None else step]
  elif step is not None:
    raise UserError(f"--step={step}: --path={path} is one checkpoint: leave out --step.")
  if (path / item).is_dir():
    path /= item
  if not tensorstore_arrays.is_at(path):
    what = (
      "a file of Flax's msgpack, which" if untrusted_files.is_there(path / "checkpoint") else ""
    )
    found = f"{what} paxlike cannot read" if what else "no arrays of Orbax"
    raise UserError(f"{path} holds {found}; checkpoints of {program} have them in {item}.")
  return path


def module_of(model: Decoder, weight: str, levels: int) -> Any:
  """Returns the module of a weight (`levels`=1), or the one that contains it (2), and so on."""
  found: Any = model
  for part in weight.split(".")[:-levels]:
    found = found[int(part)] if part.isdigit() else getattr(found, part)
  return found
