# SPDX-License-Identifier: Apache-2.0
"""Tokenizes the data of an experiment once, into rows that any run finds by number.

    python scripts/prepare_data.py --fdl_config=Text126M --fdl.DATA_PATH=corpus.jsonl --to=FOLDER
    paxlike --fdl_config=Prepared126M --fdl.DATA_PATH=FOLDER --job_log_dir=RUN

Flags but --to, --shards and --teacher_top_k are those of paxlike: any experiment will do, and its
knobs say how the data are tokenized, cut and packed. Its evaluation sets become splits too.

With --teacher_top_k=K, each training token also gets the K most probable next tokens of TEACHER, a
knob of experiments with the mixin Distillation, which then train on the rows without the teacher.
"""

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import fiddle as fdl
import tqdm

from paxlike import root_graph
from paxlike.cli import command_line
from paxlike.cli.startup import set_up_jax
from paxlike.convert import new_folder
from paxlike.data import prepared
from paxlike.data.dataset import RowDataset
from paxlike.errors import UserError
from paxlike.telemetry import console
from paxlike.training.taught_rows import TaughtRows


def main(argv: Sequence[str]) -> int:
  """Runs a command line. Returns the exit status: 2 for a user's mistake."""
  parser = console.Parser(os.path.basename(argv[0]), allow_abbrev=False)
  parser.add_argument("--to", required=True, type=console.path, help="the folder to make")
  parser.add_argument("--shards", type=int, default=8, help="files of a split (%(default)s)")
  parser.add_argument(
    "--teacher_top_k", type=int, metavar="K", help="how many predictions of TEACHER to add"
  )
  try:
    own, others = parser.parse_known_args(argv[1:])
    if own.shards < 1:
      raise UserError(f"--shards={own.shards} must be at least 1.")
    options = command_line.parse([argv[0], *others, "--mode=show"])
    if options.fdl_config is None or options.list or options.fdl_help:
      raise UserError("give --fdl_config=, the experiment whose data are prepared, and --to=.")
    set_up_jax(options)
    experiment = root_graph.experiment_of(options)
    trainer: Any = fdl.build(root_graph.of(options, experiment))
    splits = {"train": trainer.train_data} | {
      name: one.dataset for name, one in trainer.eval_data.items()
    }
    for name, rows in splits.items():
      if not isinstance(rows, RowDataset):
        raise UserError(f"{name} of {options.fdl_config} has no rows that are found by number.")
      rows.check()
    teacher = None
    if own.teacher_top_k is not None:
      splits["train"] = TaughtRows(trainer, top_k=own.teacher_top_k)
      teacher = splits["train"].record
    total = sum(rows.num_rows(0) for rows in splits.values())
    with (
      new_folder.filling(pathlib.Path(own.to), flag="to") as folder,
      tqdm.tqdm(total=total, unit="row", disable=None) as bar,
    ):
      prepared.write(
        folder,
        splits,
        vocab_size=experiment.VOCAB_SIZE,
        num_shards=own.shards,
        teacher=teacher,
        progress=bar.update,
      )
  except UserError as error:
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130
  print(
    f"{own.to}: {', '.join(f'{name} {rows.num_rows(0):,}' for name, rows in splits.items())} rows"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
