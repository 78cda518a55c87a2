# SPDX-License-Identifier: Apache-2.0
"""Fits a scaling law to finished runs: `paxlike-fit RUN...`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from paxlike.errors import UserError
from paxlike.telemetry import console, formatting, run_paths, run_records, run_status

if TYPE_CHECKING:
  from paxlike.sweep.scaling_law import Points, ScalingLaw

_HELP = """\
Fits L(N, D) = E + A / N^alpha + B / D^beta to the finished runs in folders, such as that of a sweep
(Hoffmann et al., 2022, arXiv:2203.15556, Approach 3). L: the last loss on an eval set, or, if the
runs have none, the mean training loss of the last tenth of the updates. N: the parameters that are
active for a token. D: the tokens that a run was trained on, with repetitions. Each value has the
central 95 % of a bootstrap over the runs.
"""
_LAST = 0.1  # Of the updates: a single training loss is noisy.
# Dims of the weights that --non_embedding leaves out.
_EMBEDDED = {"vocab", "position"}


class FinishedRun(NamedTuple):
  """A finished run.

  Attributes:
    path: Its folder.
    params: N.
    tokens: D.
    losses: The last loss on each eval set.
    train_loss: The mean training loss of the last updates; None if unknown.
  """

  path: str
  params: int
  tokens: int
  losses: dict[str, float]
  train_loss: float | None


def main() -> int:
  """Entry point of the `paxlike-fit` command. Returns the exit status."""
  console.outlive_readers()
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status: 0, or 2 for a user error."""
  return console.exit_status("paxlike-fit", lambda: _fit(argv))


def _parser() -> console.Parser:
  parser = console.Parser(prog="paxlike-fit", description=_HELP, allow_abbrev=False)
  run_paths.add_argument(parser)
  parser.add_argument("--set", metavar="NAME", help="the eval set, if the runs have several")
  parser.add_argument(
    "--non_embedding",
    action="store_true",
    help="N without the tables of tokens and positions and the output layer (Kaplan et al., 2020)",
  )
  parser.add_argument(
    "--params",
    type=_positive,
    metavar="N",
    help="with --tokens: predict the loss of this size",
  )
  parser.add_argument("--tokens", type=_positive, metavar="D", help="see --params")
  parser.add_argument(
    "--flops", type=_positive, metavar="C", help="also print the N and D of least loss, 6 N D = C"
  )
  parser.add_argument(
    "--bootstrap",
    type=_count,
    default=400,
    metavar="TIMES",
    help="resamples (400); 0: none",
  )
  parser.add_argument(
    "--fdl_allow_modules",
    type=lambda text: [name for name in text.split(",") if name],
    default=[],
    metavar="A,B",
    help="modules outside of paxlike that the runs' configuration may import",
  )
  return parser


def _fit(argv: Sequence[str]) -> int:
  options = _parser().parse_args(argv)
  if (options.params is None) != (options.tokens is None):
    raise UserError("--params and --tokens go together: give both.")
  paths = [path for given in options.runs for path in run_paths.within(given)]
  names = dict(zip(paths, run_paths.names(paths), strict=True))
  # Imported here, because it takes time.
  from paxlike.report.main import leave_devices_alone
  from paxlike.sweep import scaling_law

  leave_devices_alone()
  runs = []
  for path in paths:
    run_paths.check(path)
    state = run_status.state(epath.Path(path))
    if state == "finished":
      runs.append(read(path, options.fdl_allow_modules, non_embedding=options.non_embedding))
    else:
      print(f"{names[path]} is left out: it is {state or 'not started'}")
  points, what = points_of(runs, options.set)
  law = scaling_law.fit(points)
  laws = []
  if options.bootstrap:
    with console.mentioned("resampling the runs"):
      laws = scaling_law.bootstrap(points, law, times=options.bootstrap)
  kind = "non-embedding" if options.non_embedding else "active"
  print(f"{len(runs)} runs: {what}; N: {kind} parameters; D: tokens")
  print(_text(law, laws, points, [names[one.path] for one in runs], options))
  return 0


def read(path: str, allow_modules: Sequence[str], *, non_embedding: bool) -> FinishedRun:
  """Reads a finished run.

  Args:
    path: Its folder.
    allow_modules: Modules outside of paxlike that its configuration may import.
    non_embedding: Whether N is without embeddings and the output layer.

  Raises:
    UserError: Its files are missing or damaged, or do not say on how many tokens it was trained.
  """
  records = run_records.read(epath.Path(path))
  train = [record for record in records if record.get("kind") == "train"]
  evals = [r for r in records if r.get("kind") == "eval" and _is_loss(r.get("loss"))]
  losses = {r["set"]: (r["updates"], r["loss"]) for r in evals if "set" in r}
  updates = max((record["updates"] for record in (*train, *evals)), default=0)
  last = [r["loss"] for r in train if r["updates"] > (1 - _LAST) * updates and _is_loss(r["loss"])]
  return FinishedRun(
    path,
    params=_num_params(path, allow_modules, non_embedding=non_embedding),
    tokens=_tokens(path, train, updates),
    # An eval set that was dropped on the way is no result of the run.
    losses={name: loss for name, (at, loss) in losses.items() if at == updates},
    train_loss=sum(last) / len(last) if last else None,
  )


def _is_loss(value: Any) -> bool:
  return isinstance(value, int | float) and value > 0


def _tokens(path: str, train: Sequence[dict[str, Any]], updates: int) -> int:
  """Returns the tokens of all updates; a resumed run may have changed the size of its batches."""
  sizes = {
    record["updates"]: record["tokens_per_second"] * record["seconds_per_step"]
    for record in train
    if _is_loss(record.get("tokens_per_second")) and _is_loss(record.get("seconds_per_step"))
  }
  if not sizes:
    raise UserError(f"{path}: metrics.jsonl lacks the speed, from which the tokens follow.")
  total, before = 0.0, 0
  for at, size in sizes.items():
    total, before = total + (at - before) * size, at
  return round(total + (updates - before) * size)


def _num_params(path: str, allow_modules: Sequence[str], *, non_embedding: bool) -> int:
  from paxlike import fiddlers
  from paxlike.config import building, graph_file
  from paxlike.layers import flops

  graph = graph_file.read(epath.Path(path) / "config.json", allow_modules=allow_modules)
  fiddlers.next_token_only(graph)  # The loss is that of the next token.
  graph.train_data, graph.eval_data = None, {}  # They need not be on this machine.
  trainer: Any = building.build(graph)
  definition = trainer.definition
  specs = definition.weights.values() if non_embedding else ()
  return flops.active_params(definition) - sum(
    spec.size for spec in specs if _EMBEDDED & {*spec.dims}
  )


def points_of(runs: Sequence[FinishedRun], name: str | None) -> tuple["Points", str]:
  """Returns the points to fit, and what their losses are.

  Args:
    runs: Finished runs.
    name: The eval set; None: the only one that all have.

  Raises:
    UserError: It is not clear which eval set, or some runs do not have it.
  """
  import numpy as np

  from paxlike.sweep.scaling_law import Points

  sets = sorted({name for one in runs for name in one.losses})
  if name is None and len(sets) > 1:
    raise UserError(f"the runs have several eval sets: set --set to one of {', '.join(sets)}.")
  if name is not None and name not in sets:
    raise UserError(f"--set={name}: the runs have {', '.join(sets) or 'no eval sets'}.")
  chosen = name or (sets[0] if sets else None)
  losses = [one.train_loss if chosen is None else one.losses.get(chosen) for one in runs]
  if without := [one.path for one, loss in zip(runs, losses, strict=True) if loss is None]:
    kind = "training loss" if chosen is None else f"loss of {chosen} after its last update"
    raise UserError(f"{without[0]} has no {kind}: evaluate it, or leave it out.")
  what = "training loss" if chosen is None else f"loss of {chosen}"
  columns = [one.params for one in runs], [one.tokens for one in runs], losses
  return Points(*(np.array(column, np.float64) for column in columns)), what


def _text(
  law: "ScalingLaw",
  laws: list["ScalingLaw"],
  points: "Points",
  names: Sequence[str],
  options: argparse.Namespace,
) -> str:
  """Returns the law, how well it fits, and the predictions that were asked for."""
  import numpy as np

  from paxlike.sweep import scaling_law

  def row(what: str, value: Callable[["ScalingLaw"], float]) -> list[str]:
    low, high = scaling_law.interval(laws, value) if laws else (None, None)
    cells = [formatting.number(one, digits=5) for one in (value(law), low, high)]
    return [what, *cells]

  rows = [row(name, lambda one, name=name: getattr(one, name)) for name in vars(law)]
  if options.params is not None:
    what = f"loss at N={options.params:.4g}, D={options.tokens:.4g}"
    rows.append(row(what, lambda one: one.loss(options.params, options.tokens)))
  if options.flops is not None:
    what = f"of least loss with 6 N D = {options.flops:.4g}"
    rows.append(row(f"N {what}", lambda one: one.optimum(options.flops)[0]))
    rows.append(row(f"D {what}", lambda one: one.optimum(options.flops)[1]))
    rows.append(row("its loss", lambda one: one.loss(*one.optimum(options.flops))))
  header = ["", "fit", "2.5 %", "97.5 %"]
  if not laws:
    header, rows = header[:2], [line[:2] for line in rows]
  table = formatting.table(header, rows, right=range(1, len(header)))
  off = law.loss(points.params, points.tokens) / points.loss - 1
  worst = int(np.abs(off).argmax())
  fits = f"off by {np.sqrt(np.mean(off**2)):.2%} (root mean square), most {off[worst]:+.2%}"
  return f"{table}\nlosses of the runs: {fits} ({names[worst]})"


def _positive(text: str) -> float:
  try:
    value = float(text.replace("_", ""))
  except ValueError:
    value = 0.0
  if not 0 < value < float("inf"):
    raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number, such as 7e9")
  return value


def _count(text: str) -> int:
  if not text.isdecimal() or int(text) == 1:
    raise argparse.ArgumentTypeError(f"{text!r}: expected 0, or at least 2")
  return int(text)


if __name__ == "__main__":
  sys.exit(main())
