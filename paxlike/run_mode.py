# SPDX-License-Identifier: Apache-2.0
"""Executes one run in this process: graph -> trainer -> checks -> folder -> mode.

Both the command (`main`) and the Python API (`paxlike.train`, `paxlike.load`) use it.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paxlike import root_graph
from paxlike.cli import error_diagnosis, flags, startup
from paxlike.devices import topology
from paxlike.errors import UserError
from paxlike.processes import cluster
from paxlike.telemetry import console

if TYPE_CHECKING:
  from paxlike.experiment import Experiment
  from paxlike.telemetry.callbacks import Callback

#: Returns the experiment that options name; None if they name a graph or a run.
Make = Callable[[flags.Options], "Experiment | None"]


def build_trainer(graph: Any) -> Any:
  """Returns the trainer with XLA options for its devices; prints those that JAX does not know."""
  from paxlike.config import building
  from paxlike.devices import program_cache, xla_flags
  from paxlike.training.execution import Execution

  several = cluster.num_gpus() > 1 or "paxlike.processes.multiprocess" in sys.modules
  # The mesh is built first: building stacks starts JAX's backend, which fixes the GPU memory.
  mesh = building.build(graph.mesh, source="mesh") if several else None
  topology.take_gpu_memory(0 if mesh is None else mesh.num_communicators)
  trainer: Any = building.build(graph)
  if not program_cache.keeps_order(topology.devices()):
    program_cache.disable()
  compiler_options, dropped = xla_flags.options()
  for name in dropped:
    print(f"paxlike: this JAX has no option {name}: left out", file=sys.stderr)
  return dataclasses.replace(trainer, execution=Execution(compiler_options=compiler_options))


def attempt(options: flags.Options, *, make: Make):
  """Builds and checks the run that options describe, without starting it."""
  startup.resume_garbage_collection()
  experiment = make(options)
  trainer = build_trainer(root_graph.of(options, experiment))
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
  for flag in ("compiled_step", "pgle_profile"):
    if (path := getattr(options, flag)) is not None and trainer.log_layers_every == 1:
      raise UserError(
        f"--{flag}={path} has no effect with LOG_LAYERS_EVERY=1: every step logs layers, by another"
        " program. Set LOG_LAYERS_EVERY to 2 or more, or leave the flag out."
      )
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
    from paxlike.telemetry import callbacks as of_run
    from paxlike.telemetry import notebook

    callbacks = (*of_run.of_experiment(experiment), *callbacks, *notebook.callbacks())
  with trainer.watched():
    return _run(options, experiment, graph, trainer, stage, callbacks)


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
  startup.resume_garbage_collection()
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
