# SPDX-License-Identifier: Apache-2.0
"""The command `paxlike-data show --fdl_config=NAME`, which prints an experiment's data."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paxlike.cli import command_line, flags
from paxlike.errors import RunError, UserError, did_you_mean, exit_status, one_line
from paxlike.telemetry import console

if TYPE_CHECKING:
  from paxlike.data.dataset import Dataset

_HELP = """\
Prints sequences of an experiment's data as they are trained on: each token's text, whether it has
loss, the segments, special tokens and padding; then a summary of more sequences. Preference pairs
and prompts of reinforcement learning are printed, too. All other flags are those of paxlike, such
as --fdl.DATA_PATH=FILE. It needs neither an accelerator nor the model.
"""
_BATCH = 64
_TRAIN, _EVAL = "train", "eval"


def main() -> int:
  """Entry point of the `paxlike-data` command. Returns the exit status."""
  console.outlive_readers()
  # Ctrl-C ends the process at once: Python would drop a KeyboardInterrupt in a callback of its
  # garbage collector, as JAX has one. Nothing is written but caches, which are replaced as a whole.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status: 0, or 2 for a user error."""
  return console.exit_status("paxlike-data", lambda: _show(argv))


def _count(text: str) -> int:
  if not text.isdecimal():
    raise argparse.ArgumentTypeError(f"expected a number of sequences, got {text!r}")
  return int(text)


def _parser() -> console.Parser:
  parser = console.Parser(
    prog="paxlike-data",
    description=_HELP,
    allow_abbrev=False,
    usage="paxlike-data show --fdl_config=NAME [--fdl....] [--num=3] [--split=train] ...",
  )
  parser.add_argument("command", choices=("show",), help="print sequences")
  parser.add_argument("--num", type=_count, default=3, help="sequences to print (default: 3)")
  parser.add_argument(
    "--sample", type=_count, default=1000, help="sequences to summarize (default: 1000)"
  )
  parser.add_argument(
    "--split", default=_TRAIN, help="train (default), eval, or the name of an eval set"
  )
  parser.add_argument(
    "--color",
    choices=("auto", "always", "never"),
    default="auto",
    help="auto: colours on a terminal, unless NO_COLOR is set",
  )
  return parser


def _show(argv: Sequence[str]) -> int:
  own, rest = _parser().parse_known_args(argv)
  if any(flag.startswith(("--mode", "-mode")) for flag in rest):
    raise UserError("--mode is for paxlike: leave it out.")
  options = command_line.parse(["paxlike-data", "--mode=show", *rest])
  if options.help or options.list or options.fdl_help or options.against or options.changed:
    raise UserError("that flag is for paxlike itself. paxlike-data --help lists the flags.")
  # Imported after the flags have been checked, because it takes time.
  from paxlike.cli import data_page, error_diagnosis
  from paxlike.devices import jax_setup

  if options.tfds_data_dir:
    os.environ["TFDS_DATA_DIR"] = options.tfds_data_dir
  jax_setup.set_up(platform="cpu", gpu_plugin=False)
  page = data_page.Page(color=_has_color(own.color))
  try:
    with error_diagnosis.explained(options):
      found = _datasets(options, own.split)
      print(page.legend())
      for name, dataset in found.items():
        dataset.check()
        print(f"\n{name}: {dataset.named}")
        _print(dataset, page, num=own.num, sample=own.sample)
  except (UserError, RunError) as error:
    if options.traceback:
      traceback.print_exception(error)
    print(f"paxlike-data: {one_line(error)}", file=sys.stderr)
    return exit_status(error)
  return 0


def _has_color(choice: str) -> bool:
  if choice != "auto":
    return choice == "always"
  return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _datasets(options: flags.Options, split: str) -> "dict[str, Dataset]":
  """Returns the data sets of a split by name; builds no model."""
  from paxlike import root_graph
  from paxlike.config import building

  graph = root_graph.of(options, root_graph.experiment_if_named(options))
  sets: Mapping[str, Any] = graph.eval_data
  if split == _TRAIN:
    if graph.train_data is None:
      raise UserError("this experiment has no training data: give --split=eval.")
    return {split: building.build(graph.train_data, source="train_data")}
  names = [split] if split != _EVAL or split in sets else [*sets]
  if not names:
    raise UserError("--split=eval: this experiment has no evaluation data (eval_data).")
  if unknown := [name for name in names if name not in sets]:
    known = (_TRAIN, _EVAL, *sets)
    hint = did_you_mean(unknown[0], known)
    raise UserError(f"--split={unknown[0]}: expected one of {', '.join(known)}.{hint}")
  return {name: building.build(sets[name].dataset, source=name) for name in names}


def _print(dataset: "Dataset", page: Any, *, num: int, sample: int):
  from paxlike.cli.data_page import Summary
  from paxlike.data.tuning.prompts import Prompts

  summary, kind = Summary(), "prompts" if isinstance(dataset, Prompts) else "sequences"
  size = dataset.epoch_rows
  of = "" if size is None else f" of {size}"
  for index, arrays in enumerate(_rows(dataset, max(num, sample), size)):
    title = f"{kind.removesuffix('s')} {index + 1}{of}"
    if index < num:
      print()
      if isinstance(dataset, Prompts):
        record = int(arrays["records"][0, 0])
        print(page.prompt(arrays["prompts"][0], dataset, record, title=title))
      else:
        print(page.sequence({key: x[0] for key, x in arrays.items()}, dataset, title=title))
    if index < sample:
      summary.add(arrays)
  if sample:
    print(f"\n{summary.text(dataset, kind=f'{kind}{of}')}", flush=True)


def _rows(dataset: "Dataset", most: int, size: int | None) -> "Iterator[dict[str, Any]]":
  """Yields up to `most` sequences of the first epoch, each as a batch of one."""
  most = most if size is None else min(most, size)
  if not most:
    return
  with dataset.batches(min(_BATCH, most), prefetch=1) as batches:
    for number in range(most):
      row = number % min(_BATCH, most)
      if not row:
        arrays = next(batches).arrays
      yield {key: values[row : row + 1] for key, values in arrays.items()}


if __name__ == "__main__":
  sys.exit(main())
