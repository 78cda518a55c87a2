# SPDX-License-Identifier: Apache-2.0
"""A run from Python: `train` makes one, `Run` is what its folder holds."""

import functools
import importlib.util
import json
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from etils import epath

from paxlike import launch, run_folder
from paxlike.cli import epochs, flags, starting, unexpected
from paxlike.errors import UserError

if TYPE_CHECKING:
  from paxlike.api.model import Model
  from paxlike.experiment import Experiment
  from paxlike.telemetry.callbacks import Callback


class Run:
  """The run in a folder, which may go on elsewhere: everything is read when it is asked for.

  Attributes:
    folder: As given, or with the working directory of then before it.
    allow_modules: See `load`.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, allow_modules: Sequence[str] = (), graph: Any = None
  ):
    """Opens the folder of a run.

    Args:
      folder: Local or on a bucket.
      allow_modules: Modules outside of paxlike that the files of the run may use, and so import.
      graph: The root graph of the run, from its experiment; None: `load` reads that file.

    Raises:
      UserError: There is no such folder.
    """
    self.folder: epath.Path = run_folder.absolute(folder)
    run_folder.existing(os.fspath(self.folder))
    self.allow_modules = tuple(allow_modules)
    self._graph = graph

  def __repr__(self) -> str:
    return f"<Run {self.folder}: {self.status or 'no status'}, checkpoints {self.steps}>"

  @property
  def status(self) -> str | None:
    """How the run is: running, finished, stopped, failed, lost or stalled; None: it never began.

    A run is lost whose process has ended without a word.

    Raises:
      UserError: `status.json` is damaged.
    """
    from paxlike.telemetry import run_log

    path = self.folder / "status.json"
    if not path.exists():
      return None
    try:
      state = str(json.loads(run_folder.read_bytes(path))["state"])
    except run_folder.MALFORMED as error:
      raise UserError(f"{path} is damaged: {run_folder.reason(error)}.") from error
    return "lost" if state == "running" and not run_log.is_running(self.folder) else state

  @property
  def steps(self) -> list[int]:
    """The checkpoints that there are, oldest first, by the number of updates before each."""
    from paxlike.checkpoints.checkpoint import Checkpoints

    return Checkpoints(self.folder / "checkpoints", keep=None).steps()

  def records(self) -> list[dict[str, Any]]:
    """Returns the records of `metrics.jsonl`, oldest first.

    Each has `kind` ("train" or "eval"), `step` (of training counted from 0; of an evaluation the
    same as `updates`), `updates` (completed optimizer steps), `time` (seconds since 1970) and
    `loss`. Those of training also have `learning_rate`, `grad_norm`, `total_weights` and, but for
    the first, `seconds_per_step` and what follows from it; those of an evaluation `set`, the name
    of the eval set, and its metrics. A number that was not finite is None.
    """
    from paxlike.telemetry import metric_files

    return list(metric_files.records(self.folder))

  def metrics(self) -> Any:
    """Returns `records()` as a table of pandas, a row each; without pandas the list itself."""
    records = self.records()
    if importlib.util.find_spec("pandas") is None:
      return records
    import pandas

    return pandas.DataFrame.from_records(records)

  def load(self, step: "int | Literal['best'] | None" = None) -> "Model":
    """Returns the model of a checkpoint; None: the newest. Best: by `BEST_CHECKPOINT_METRIC`.

    Raises:
      UserError: There is no such checkpoint; or see `load`.
    """
    from paxlike.api import model

    if self._graph is None:
      return model.load(self.folder, step, allow_modules=self.allow_modules)
    return model.Model(self.folder, self._graph, step=step, allow_modules=self.allow_modules)


def train(
  experiment: "type[Experiment] | Experiment | str",
  folder: str | os.PathLike[str],
  *,
  callbacks: "Sequence[Callback]" = (),
  **knobs: Any,
) -> Run:
  """Trains an experiment in a folder, as `paxlike --fdl_config=... --job_log_dir=...` does.

  If the run is there already, it goes on from its newest checkpoint. Ctrl-C (or a notebook's stop
  button) and SIGTERM save a checkpoint before they end this by KeyboardInterrupt and SystemExit.
  Where data sets of TFDS are is what the variable TFDS_DATA_DIR says.

  Args:
    experiment: A class, an instance (which stays as it is) or a name as of `--fdl_config`.
    folder: Of the run; it is made if missing.
    callbacks: Called while it trains, after those of the experiment.
    **knobs: Other values of its knobs, such as MAX_STEPS=200; a text is read as on the command
      line.

  Returns:
    The run.

  Raises:
    UserError: The experiment, a knob, the data, the devices or the folder do not allow it.
    RunError: It failed, as where the loss is no longer finite.
  """
  options = flags.Options(
    mode="train",
    fdl_config=_name_of(experiment),
    knobs=launch.as_texts(knobs),
    job_log_dir=os.fspath(folder),
  )
  make = functools.partial(_make, experiment=experiment, knobs=knobs)
  with launch.among_others(leave=False), unexpected.explained(options, entry=True) as stage:
    starting.set_up_jax(options)
    from paxlike.telemetry import callbacks as checking

    launch.leave_at_exit()
    stage.attempt = functools.partial(launch.attempt, make=make)
    made = make(options)
    epochs.resolve(made, lambda: launch.built(launch.graph_of(options, made)))
    graph = launch.graph_of(options, made)
    given = checking.check(callbacks, source="paxlike.train: callbacks")
    status = launch.run(options, made, graph, stage, given)
  if status == 128 + signal.SIGINT:
    raise KeyboardInterrupt(f"the run in {folder} is saved; the same call goes on with it")
  if status:
    raise SystemExit(status)
  return Run(folder, allow_modules=[type(made).__module__], graph=graph)


def _name_of(experiment: "type[Experiment] | Experiment | str") -> str:
  """Returns the name that finds an experiment, or its class, again.

  Raises:
    UserError: It is none.
  """
  if isinstance(experiment, str):
    return experiment
  from paxlike.experiment import Experiment

  cls = experiment if isinstance(experiment, type) else type(experiment)
  if not issubclass(cls, Experiment):
    raise UserError(
      f"paxlike.train: expected an experiment, its class or its name, got {experiment!r:.100}."
    )
  return f"{cls.__module__}.{cls.__qualname__}"


def _make(
  options: flags.Options,
  *,
  experiment: "type[Experiment] | Experiment | str",
  knobs: dict[str, Any],
) -> "Experiment":
  """Returns the experiment with those of the knobs that options name."""
  from paxlike import registry

  if isinstance(experiment, str):
    made = registry.find(experiment)()
  elif isinstance(experiment, type):
    made = experiment()
  else:
    made = type(experiment)()
    for name, setting in experiment.settings().items():
      made.set(name, setting.value, source=setting.source)
  for name, _ in options.knobs:
    made.set(name, knobs[name], source="paxlike.train")
  return made
