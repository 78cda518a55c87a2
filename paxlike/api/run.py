# SPDX-License-Identifier: Apache-2.0
"""Runs in Python: `train` trains one, `Run` reads its folder."""

import functools
import importlib.util
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from etils import epath

from paxlike import file_io, root_graph, run_folder, run_mode
from paxlike.api import error_messages
from paxlike.cli import epochs, error_diagnosis, flags, startup
from paxlike.config import knob_text
from paxlike.errors import UserError
from paxlike.processes import phases, work_report

if TYPE_CHECKING:
  from paxlike.api.model import Model
  from paxlike.experiment import Experiment
  from paxlike.telemetry.callbacks import Callback


class Run:
  """The run in a folder. Nothing is cached, because the run may be in progress elsewhere.

  Attributes:
    folder: Its absolute path.
    allow_modules: See `load`.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, allow_modules: Sequence[str] = (), graph: Any = None
  ):
    """Opens the folder of a run.

    Args:
      folder: Local or on a bucket.
      allow_modules: Modules outside of paxlike that the run's files may import.
      graph: The root graph of the run; None: `load` reads it from the folder.

    Raises:
      UserError: There is no such folder.
    """
    self.folder: epath.Path = file_io.absolute(folder)
    with error_messages.for_python():
      run_folder.existing(os.fspath(self.folder))
    self.allow_modules = tuple(allow_modules)
    self._graph = graph

  def __repr__(self) -> str:
    return f"<Run {self.folder}: {self.status or 'no status'}, checkpoints {self.steps}>"

  @property
  def status(self) -> str | None:
    """The run's state: running, finished, stopped, failed, lost or stalled; None: never started.

    Lost: its process has exited without writing its state.

    Raises:
      UserError: `status.json` is damaged.
    """
    from paxlike.telemetry import run_status

    return run_status.state(self.folder)

  @property
  def steps(self) -> list[int]:
    """Steps of the existing checkpoints, oldest first."""
    from paxlike.checkpoints.run_checkpoints import Checkpoints

    return Checkpoints(self.folder / "checkpoints", keep=None).steps()

  def records(self) -> list[dict[str, Any]]:
    """Returns the records of `metrics.jsonl`, oldest first.

    Each has `kind` ("train", "eval", "layers" or "sample"), `step` (for training and layers counted
    from 0, else the same as `updates`), `updates` (completed optimizer steps) and `time` (seconds
    since 1970). Training records have `loss`, `learning_rate`, `grad_norm`, `total_weights` and,
    except the first, `seconds_per_step` and values derived from it. Evaluation records have `set`,
    the name of the eval set, its metrics and `loss`; samples have `prompt` and `text`. Records of
    layers (LOG_LAYERS_EVERY) have `layers`: metric -> group -> the value of each layer. Numbers
    that were not finite are None.
    """
    from paxlike.telemetry import metric_files

    return list(metric_files.records(self.folder))

  def metrics(self) -> Any:
    """Returns the records of training and evaluation as a DataFrame; a list without pandas."""
    records = [record for record in self.records() if record.get("kind") in ("train", "eval")]
    if importlib.util.find_spec("pandas") is None:
      return records
    import pandas

    return pandas.DataFrame.from_records(records)

  def load(self, step: "int | Literal['best'] | None" = None) -> "Model":
    """Returns the model of a checkpoint; None: the newest; "best": by BEST_CHECKPOINT_METRIC.

    Raises:
      UserError: There is no such checkpoint, or `paxlike.load` fails.
    """
    from paxlike.api import model

    if self._graph is None:
      return model.load(self.folder, step, allow_modules=self.allow_modules)
    with error_messages.for_python(self.folder):
      return model.Model(self.folder, self._graph, step=step, allow_modules=self.allow_modules)


@error_messages.for_python()
def train(
  experiment: "type[Experiment] | Experiment | str",
  folder: str | os.PathLike[str],
  *,
  callbacks: "Sequence[Callback]" = (),
  **knobs: Any,
) -> Run:
  """Trains an experiment in a folder, as `paxlike --fdl_config=... --job_log_dir=...` does.

  An existing run resumes from its newest checkpoint. Ctrl-C (or a notebook's stop button) and
  SIGTERM save a checkpoint, then raise KeyboardInterrupt and SystemExit. The environment variable
  TFDS_DATA_DIR is the folder of TFDS data sets.

  Args:
    experiment: A class, an instance (not modified) or a name as for `--fdl_config`.
    folder: The run's folder; created if missing.
    callbacks: Called during training, after the experiment's callbacks.
    **knobs: Overrides of its knobs, such as MAX_STEPS=200; strings are parsed as on the command
      line.

  Returns:
    The run.

  Raises:
    UserError: The experiment, a knob, the data or the folder is invalid, or does not fit the
      devices.
    RunError: Training failed, for example because the loss is not finite.
  """
  options = flags.Options(
    mode="train",
    fdl_config=name_of(experiment),
    knobs=knob_text.pairs(knobs),
    job_log_dir=os.fspath(folder),
  )
  made_of = functools.partial(make, experiment=experiment, knobs=knobs)
  with (
    work_report.reporting_failure(leave=False),
    error_diagnosis.explained(options, entry=True) as stage,
  ):
    phases.OWN.restart()
    startup.set_up_jax(options)
    from paxlike.telemetry import callbacks as checking

    work_report.leave_at_exit()
    stage.attempt = functools.partial(run_mode.attempt, make=made_of)
    stage.experiment = made = made_of(options)
    epochs.resolve(made, lambda: run_mode.build_trainer(root_graph.of(options, made)))
    graph = root_graph.of(options, made)
    given = checking.check(callbacks, source="paxlike.train: callbacks")
    status = run_mode.run(options, made, graph, stage, given)
  if status == 128 + signal.SIGINT:
    raise KeyboardInterrupt(f"the run in {folder} is saved; the same call resumes it")
  if status:
    raise SystemExit(status)
  return Run(folder, allow_modules=[type(made).__module__], graph=graph)


def name_of(experiment: "type[Experiment] | Experiment | str") -> str:
  """Returns the name by which the registry finds an experiment or its class.

  Raises:
    UserError: It is not an experiment.
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


def make(
  options: flags.Options,
  *,
  experiment: "type[Experiment] | Experiment | str",
  knobs: dict[str, Any],
) -> "Experiment":
  """Returns a new instance of the experiment, with those of `knobs` set that `options` name."""
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
