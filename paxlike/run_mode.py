# SPDX-License-Identifier: Apache-2.0
"""Executes one run in this process: experiment -> graph -> trainer -> checks -> folder -> mode.

Both the command (`main`) and the Python API (`paxlike.train`, `paxlike.load`) use it.
"""

import atexit
import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paxlike.cli import error_diagnosis, flags
from paxlike.config import knob_text
from paxlike.devices import topology
from paxlike.errors import TemporaryError, UserError
from paxlike.processes import cluster
from paxlike.telemetry import console

if TYPE_CHECKING:
  from paxlike.experiment import Experiment
  from paxlike.telemetry.callbacks import Callback

_SEARCH_SECONDS = 5  # Time limit of `_enabling`.

TEMPORARY = 75  #: EX_TEMPFAIL of sysexits.h: a launcher should restart the job.

# The exceptions that ended this process's work in a multi-process job.
_failures: list[BaseException] = []


def status_of(error: BaseException) -> int:
  """Returns the exit status of a process that an exception ends."""
  if isinstance(error, UserError):
    return 2
  return TEMPORARY if isinstance(error, TemporaryError) else 1


#: Returns the experiment that options name; None if they name a graph or a run.
Make = Callable[[flags.Options], "Experiment | None"]


@contextlib.contextmanager
def reporting_failure(*, leave: bool) -> Iterator[None]:
  """Context of this process's work, whose failure is reported to the other processes of its job.

  With `leave`, success is reported too.
  """
  try:
    yield
  except BaseException as error:
    if others := sys.modules.get("paxlike.processes.multiprocess"):
      _failures.append(error)
      others.fail(error)
    raise
  if leave and (others := sys.modules.get("paxlike.processes.multiprocess")):
    others.leave()


@functools.cache
def leave_at_exit():
  """Makes this process report its exit to the other processes of its job, if there are any."""
  if others := sys.modules.get("paxlike.processes.multiprocess"):
    atexit.register(_leave, others)


def _leave(others: Any):
  if not _failures:
    others.leave()
    return
  # JAX's shutdown would wait for the other processes, which exit by themselves.
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status_of(_failures[0]))


def as_texts(knobs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
  """Returns knobs given in Python as (name, text) pairs, as from a command line."""
  return tuple((n, v if isinstance(v, str) else knob_text.spell(v)) for n, v in knobs.items())


def experiment_if_named(options: flags.Options) -> "Experiment | None":
  """Returns the experiment that options name; None if they name a graph file or a run."""
  # Knobs without an experiment apply to the experiment of the run's folder.
  about_knobs = options.knobs or options.fdl_help
  is_named = options.fdl_config or (about_knobs and not options.fdl_config_file)
  return experiment_of(options) if is_named else None


def experiment_of(options: flags.Options) -> "Experiment":
  """Returns the experiment that options name, with its knobs set.

  Raises:
    UserError: There is no such experiment or knob, or a value is wrong.
  """
  from paxlike import registry, run_folder, saved_experiment

  if options.fdl_config is None:
    assert options.job_log_dir is not None
    folder, modules = run_folder.existing(options.job_log_dir), options.fdl_allow_modules
    return saved_experiment.read(folder, options.knobs, allow_modules=modules)
  experiment = registry.find(options.fdl_config)()
  for name, text in options.knobs:
    experiment.set(name, text, source="command line")
  return experiment


def graph_of(options: flags.Options, experiment: "Experiment | None") -> Any:
  """Returns the root graph of an experiment or a file, with the edits of the options.

  Raises:
    UserError: The experiment never reads a knob that was set, or an edit is wrong.
  """
  from paxlike import fiddlers, run_folder, saved_experiment
  from paxlike.cli import hints
  from paxlike.config import graph_file

  if experiment is None:
    path = options.fdl_config_file
    if path is None:
      assert options.job_log_dir is not None
      path = run_folder.existing(options.job_log_dir) / "config.json"
    with run_folder.reading(path):
      graph = graph_file.read(path, allow_modules=options.fdl_allow_modules)
  else:
    graph = root_graph(experiment)
    _callbacks(experiment)  # They may read knobs, too.
    given = experiment.settings()
    for name in experiment.unread():
      if given[name].source != saved_experiment.FILE:
        which = _enabling(experiment, name)
        raise UserError(f"{name} has no effect with the other knobs as they are{which}.")
  if options.mode == "decode":
    fiddlers.decoding(graph)
  for text in options.fiddlers:
    graph = graph_file.call_fiddler(graph, text, fiddlers.FIDDLERS)
  for path, text in options.edits:
    with hints.of_edit(experiment, path, text):
      graph_file.set_path(graph, path, text)
  return graph


def root_graph(experiment: "Experiment") -> Any:
  """Returns the root graph of an experiment.

  Raises:
    UserError: `trainer()` does not return a graph of `Trainer`.
  """
  from paxlike.config import building
  from paxlike.training.trainer import Trainer

  graph = experiment.trainer()
  source = f"what {type(experiment).__name__}.trainer() returns"
  building.check_kind(graph, Trainer, source=source)
  return graph


def _enabling(experiment: "Experiment", name: str) -> str:
  """Returns the end of a message: a value of another knob that gives `name` an effect, or ""."""
  began = time.monotonic()
  values = experiment.values()
  for other, knob in type(experiment).knobs().items():
    is_read = other in experiment.read_names()
    for choice in knob.trials(values[other].value) if is_read else ():
      if time.monotonic() - began > _SEARCH_SECONDS:
        return ""
      one = type(experiment)()
      settings = {n: setting.value for n, setting in experiment.settings().items()}
      for given, value in {**settings, other: choice}.items():
        one.set(given, value, source="trial")
      error_diagnosis.failure(one.trainer)  # Even if it fails, it may have read the knob.
      if name in one.read_names():
        return f": {other}={knob_text.spell(choice)} would give it one"
  return ""


def build_trainer(graph: Any) -> Any:
  """Returns the trainer with XLA options for its devices; prints those that JAX does not know."""
  from paxlike.config import building
  from paxlike.devices import xla_flags
  from paxlike.training.execution import Execution

  several = cluster.num_gpus() > 1 or "paxlike.processes.multiprocess" in sys.modules
  # The mesh is built first: building stacks starts JAX's backend, which fixes the GPU memory.
  mesh = building.build(graph.mesh, source="mesh") if several else None
  topology.take_gpu_memory(0 if mesh is None else mesh.num_communicators)
  trainer: Any = building.build(graph)
  compiler_options, dropped = xla_flags.options()
  for name in dropped:
    print(f"paxlike: this JAX has no option {name}: left out", file=sys.stderr)
  return dataclasses.replace(trainer, execution=Execution(compiler_options=compiler_options))


def attempt(options: flags.Options, *, make: Make):
  """Builds and checks the run that options describe, without starting it."""
  experiment = make(options)
  trainer = build_trainer(graph_of(options, experiment))
  if options.mode not in ("decode", "show"):
    trainer.check(training=options.mode != "eval")
  if options.mode == "train" and trainer.num_steps:
    trainer.trace()


def _check(options: flags.Options, graph: Any, trainer: Any) -> tuple[Any, Any, Any]:
  """Runs all checks, together with the other processes; writes nothing.

  Returns (trainer with the step of --compiled_step, prompts, decoding options); the latter two are
  for --mode=decode.
  """
  import jax

  from paxlike.cli import decode_options
  from paxlike.compilation import aot
  from paxlike.config import graph_file
  from paxlike.processes import phases
  from paxlike.telemetry.trackers import registry as trackers

  others = sys.modules.get("paxlike.processes.multiprocess")
  phases.enter("compare")
  if others:
    others.compare(graph_file.values(graph))
  phases.enter("check")
  if options.mode != "decode":
    trainer.check(training=options.mode == "train")
  if options.mode == "train" and jax.process_index() == 0:
    trackers.check(trainer.trackers)
  if options.compiled_step is not None:
    compiled_step = aot.load_step(trainer, options.compiled_step)
    execution = dataclasses.replace(trainer.execution, compiled_step=compiled_step)
    trainer = dataclasses.replace(trainer, execution=execution)
  elif options.mode == "train" and trainer.num_steps:
    with console.mentioned("tracing the step"):
      trainer.trace()
  prompts, how = decode_options.read(options) if options.mode == "decode" else ([], None)
  phases.enter("meet")
  if others:
    others.compare()
  return trainer, prompts, how


def run(
  options: flags.Options,
  experiment: "Experiment | None",
  graph: Any,
  stage: error_diagnosis.Stage,
  callbacks: "Sequence[Callback]" = (),
) -> int:
  """Trains, evaluates or decodes. Returns the exit status: 128 + the signal that ended training.

  Training calls the experiment's callbacks and `callbacks`.

  Raises:
    UserError: A check failed, before anything was written, or the folder cannot be written.
    RunError: The run failed.
  """
  trainer = build_trainer(graph)
  saving = trainer.saving and options.enable_checkpoint_saving
  trainer = dataclasses.replace(trainer, saving=saving)
  if console.in_notebook() and trainer.stall_timeout is None:
    # A stall must not end the user's kernel.
    trainer = dataclasses.replace(trainer, stall_timeout=0)
  if options.mode == "train" and experiment is not None:
    from paxlike.telemetry import notebook

    callbacks = (*_callbacks(experiment), *callbacks, *notebook.callbacks())
  with trainer.watched():
    return _run(options, experiment, graph, trainer, stage, callbacks)


def _callbacks(experiment: "Experiment") -> "list[Callback]":
  from paxlike.telemetry import callbacks

  source = f"what {type(experiment).__name__}.callbacks() returns"
  return callbacks.check(experiment.callbacks(), source=source)


def _run(
  options: flags.Options,
  experiment: "Experiment | None",
  graph: Any,
  trainer: Any,
  stage: error_diagnosis.Stage,
  callbacks: "Sequence[Callback]",
) -> int:
  from paxlike import run_folder
  from paxlike.processes import lease
  from paxlike.telemetry.run_log import RunLog
  from paxlike.training import continuous_evaluation, decode_mode

  assert options.job_log_dir is not None
  trainer, prompts, how = _check(options, graph, trainer)
  stage.is_over = True
  if options.pgle_profile is not None:
    from paxlike.profiling import guided

    trainer = guided.scheduled(trainer, options.pgle_profile, measures=True)
  # The weights of CHECKPOINT_RESTORE_PATH can be evaluated in a new folder.
  is_new = options.mode == "train" or (options.mode == "eval" and trainer.restore is not None)
  with contextlib.ExitStack() as stack:
    if not is_new:
      folder = run_folder.existing(options.job_log_dir)
    else:
      folder = stack.enter_context(run_folder.entered(options.job_log_dir))
    others = sys.modules.get("paxlike.processes.multiprocess")
    if others and options.mode == "train" and trainer.saving:
      others.check_shared(folder)
    # Only training needs the lease: evaluation and decoding write their own files, atomically.
    owned = options.mode == "train"
    owner = stack.enter_context(lease.owned(folder)) if owned else contextlib.nullcontext()
    check_owner = getattr(owner, "check", lambda: None)
    run_log = stack.enter_context(
      RunLog(
        folder,
        write_summaries=options.enable_summary_writer,
        check_owner=check_owner,
        callbacks=callbacks,
        ledger=_ledger(folder, check_owner) if owned else None,
        tracking=_tracking(experiment, trainer),
      )
    )
    if options.mode != "train":
      of = " of prompts" if options.mode == "decode" else ""
      run_log.note(f"attention{of}: {', '.join(trainer.attention)}")
      run_log.note(f"computes in {trainer.compute_dtype}")
    if options.mode == "eval" and options.continuous:
      continuous_evaluation.follow(trainer, folder, run_log)
    elif options.mode == "eval":
      trainer.evaluate(folder, run_log, step=_step(options, folder))
    elif options.mode == "decode":
      step = _step(options, folder)
      decode_mode.run(trainer, folder, run_log, prompts, step=step, options=how)
    else:
      from paxlike.cli import config_files, hints
      from paxlike.training import train_step

      with run_folder.reading(folder / "config.json"):
        _print_changes(folder / "config.json", graph, run_log)
      if note := train_step.note_on_memory(trainer.definition, trainer.objective):
        run_log.note(note)
      stopped_by = trainer.train(folder, run_log, files=config_files.of(experiment, graph))
      if stopped_by:
        run_log.note(f"{hints.stopped(stopped_by)}{hints.saved(options.job_log_dir)}")
      return 128 + stopped_by if stopped_by else 0
  return 0


def _ledger(folder: Any, check_owner: Callable[[], None]) -> Any:
  """Returns the ledger of a run in process 0; None in the others."""
  import jax

  from paxlike.telemetry import goodput

  return goodput.Ledger(folder, check_owner=check_owner) if jax.process_index() == 0 else None


def _tracking(experiment: "Experiment | None", trainer: Any) -> Any:
  """Returns the trackers of a run, with the knobs that they show."""
  from paxlike.config.knobs import UNSET
  from paxlike.telemetry.trackers.recorder import Tracking

  values = {} if experiment is None else experiment.values()
  knobs = {name: one.value for name, one in values.items() if one.value is not UNSET}
  return Tracking(names=trainer.trackers, project=trainer.tracker_project, knobs=knobs)


def profile(options: flags.Options, graph: Any) -> int:
  """Trains a few steps and prints where their time goes. Returns the exit status.

  Raises:
    UserError: A check failed, or the devices cannot be profiled.
  """
  import jax

  from paxlike.cli import profile_page
  from paxlike.config import graph_file
  from paxlike.profiling import guided

  trainer = build_trainer(graph)
  if others := sys.modules.get("paxlike.processes.multiprocess"):
    others.compare(graph_file.values(graph))
  trainer.check(training=True)
  found = guided.profile(trainer, folder=options.job_log_dir, to=options.save)
  if jax.process_index() == 0:
    show = profile_page.as_json if options.json else profile_page.text
    print(show(found, trainer))
  return 0


def _step(options: flags.Options, folder: Any) -> int | None:
  """Returns the checkpoint that the options name; None for the newest."""
  from paxlike.training import best_checkpoint

  return best_checkpoint.step_of(folder) if options.step == "best" else options.step


def _print_changes(path: Any, graph: Any, run_log: Any):
  """Prints what has changed in the graph since the run began, if anything has."""
  from paxlike.cli import config_files
  from paxlike.config import graph_file

  if not path.exists():
    return
  try:
    before = graph_file.read_data(path)
  except UserError as error:
    run_log.note(f"changes since the run began are unknown: {error}")
    return
  if changes := config_files.changes(before, graph, folder=path.parent):
    run_log.note(f"changed since the run began:\n{changes}")
