# SPDX-License-Identifier: Apache-2.0
"""The `paxlike` command: flags -> experiment -> graph -> trainer -> mode."""

import contextlib
import functools
import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from paxlike import root_graph, run_mode
from paxlike.cli import command_line, error_diagnosis, flags, startup, usage
from paxlike.devices import topology
from paxlike.errors import TEMPORARY, RunError, UserError, exit_status, one_line
from paxlike.processes import owner, phases, stack_traces, work_report
from paxlike.run_mode import build_trainer
from paxlike.telemetry import console

# Exceptions whose frames must stay alive until the process exits: XLA may still be compiling, and
# would crash if the objects that they refer to were freed.
_interrupted: list[BaseException] = []


def run():
  """Entry point of the `paxlike` command."""
  startup.postpone_garbage_collection()
  # Idle threads of NumPy's BLAS would spin for 0.1 s before they sleep.
  os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
  console.outlive_readers()
  sys.unraisablehook = _report_unraisable
  # If reading or writing a checkpoint fails, Orbax abandons coroutines that it has not started.
  warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)
  # On a full disk, a warning per cache entry would hide the run's own message.
  warnings.filterwarnings("ignore", "Error .* persistent compilation cache entry")
  status = 1
  stack_traces.obey_sigterm()
  phases.OWN.restart(ago=owner.age())
  try:
    with stack_traces.on_signal():
      status = main(sys.argv)
  finally:
    alone = "paxlike.processes.multiprocess" not in sys.modules
    if _interrupted or (status in (1, 2, 3, TEMPORARY) and not alone):
      # `os._exit` skips JAX's shutdown, which would wait for the other processes (they exit by
      # themselves), and does not free `_interrupted`. A run that Ctrl-C has stopped does wait.
      if sys.exc_info()[1] is not None:
        traceback.print_exc()
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(status)
  # Without this, the interpreter scans all objects once more as it exits.
  gc.freeze()
  sys.exit(status)


def _report_unraisable(error: Any):
  # When a write fails, TensorStore reports the other writes to an event loop that is already
  # closed; when a read fails, Orbax drops the coroutines of the other reads, and Python warns.
  dropped = "orbax" in getattr(getattr(error.object, "cr_code", None), "co_filename", "")
  if str(error.exc_value) != "Event loop is closed" and not dropped:
    sys.__unraisablehook__(error)


def main(argv: Sequence[str]) -> int:
  """Runs a command line.

  Returns the exit status: 1 if the run or a check failed, 2 for invalid input, 3 if --mode=compile
  or --mode=plan finds that a step does not fit into device memory, 75 if a restart may help.
  """
  options = flags.Options(traceback="--traceback" in argv)
  try:
    options = command_line.parse(argv)
    if options.help:
      print(usage.HELP, end="")
      return _with_output(0)
    with (
      work_report.reporting_failure(leave=True),
      contextlib.ExitStack() as target,
      error_diagnosis.explained(options) as stage,
    ):
      startup.set_up_jax(options)
      # `target` ends after `explained`, which may try other options for the same devices.
      if len(options.topologies) <= 1:
        target.enter_context(topology.target(options.topology, slices=options.slices or 1))
      status = _dispatch(options, stage)
      prints_only = options.list or options.fdl_help
      writes_files = options.mode in ("train", "eval", "decode") and not prints_only
      return status if writes_files else _with_output(status)
  except (UserError, RunError) as error:
    if options.traceback:
      traceback.print_exception(error)
    print(f"paxlike: {one_line(error)}", file=sys.stderr)
    return exit_status(error)
  except KeyboardInterrupt as error:
    _interrupted.append(error)
    from paxlike.cli import hints

    saved = hints.saved(options.job_log_dir) if options.mode == "train" else ""
    print(f"paxlike: interrupted.{saved}", file=sys.stderr)
    return 130


def _with_output(status: int) -> int:
  """Returns `status`, or 1 if standard output, the command's only result, was lost."""
  return 1 if console.output_is_lost() else status


def _dispatch(options: flags.Options, stage: error_diagnosis.Stage) -> int:
  stage.attempt = functools.partial(run_mode.attempt, make=root_graph.experiment_if_named)
  from paxlike.cli import epochs, knob_page, show_page

  # Runs resume it after their checks; --mode=compile never does: its process ends after compiling.
  if options.mode not in ("train", "eval", "decode", "compile"):
    startup.resume_garbage_collection()
  if options.list:
    print(show_page.experiments())
    return 0
  stage.experiment = experiment = root_graph.experiment_if_named(options)
  if options.fdl_help:
    assert experiment is not None
    print(knob_page.help_text(type(experiment)))
    return 0
  if options.mode == "plan":
    from paxlike import plan_mode

    assert experiment is not None
    return plan_mode.run(options, experiment)
  if options.mode == "transfer":
    from paxlike import transfer_mode

    assert experiment is not None
    if experiment.rollouts() is not None:
      raise UserError("--mode=transfer has no step for reinforcement learning.")
    return transfer_mode.run(options, experiment)
  if experiment is not None and options.mode == "train":
    epochs.resolve(experiment, lambda: build_trainer(root_graph.of(options, experiment)))
  graph = root_graph.of(options, experiment)
  if options.mode == "show":
    if options.against:
      from paxlike import registry

      other = root_graph.of_experiment(registry.find(options.against, flag="against")())
      print(show_page.difference(graph, other, name=options.against))
    elif options.changed:
      assert experiment is not None
      print(show_page.changed(experiment, graph))
    else:
      print(show_page.everything(experiment, graph))
    return 0
  if options.mode in ("profile", "check") and getattr(graph, "rollouts", None) is not None:
    raise UserError(f"--mode={options.mode} has no step for reinforcement learning.")
  if options.mode == "compile":
    return _compile(options, build_trainer(graph))
  if options.mode == "profile":
    return _profile(options, build_trainer(graph), graph)
  if options.mode == "check":
    from paxlike import checks
    from paxlike.cli import check_page

    folder = options.job_log_dir if options.enable_checkpoint_saving else None
    found = checks.run(graph, build_trainer, folder=folder, full=options.full)
    return check_page.show(found, as_json=options.json)
  return run_mode.run(options, experiment, graph, stage)


def _compile(options: flags.Options, trainer: Any) -> int:
  """Compiles the step and prints a report. Returns 3 if it does not fit into device memory."""
  from paxlike.cli import compile_page
  from paxlike.compilation import aot
  from paxlike.devices import program_cache

  if options.kernels:
    aot.check_kernels(trainer)
  if options.pgle_profile is not None:
    from paxlike.profiling import guided

    trainer = guided.scheduled(trainer, options.pgle_profile)
  # Kernels are shown with the scopes that they have in this program.
  with program_cache.by_metadata() if options.kernels else contextlib.nullcontext():
    program = aot.compile_step(trainer, save=options.save)
  if options.json:
    print(json.dumps(compile_page.facts(trainer, program, with_kernels=options.kernels)))
  else:
    print(compile_page.text(trainer, program, with_kernels=options.kernels))
  if options.save is not None and program.step is None:
    print(f"paxlike: --save={options.save}: there is no step to save", file=sys.stderr)
  return 0 if program.fits else 3


def _profile(options: flags.Options, trainer: Any, graph: Any) -> int:
  """Trains a few steps and prints where their time goes."""
  import jax

  from paxlike.cli import profile_page
  from paxlike.config import graph_file
  from paxlike.profiling import guided

  if others := sys.modules.get("paxlike.processes.multiprocess"):
    others.compare(graph_file.values(graph))
  trainer.check(training=True)
  found = guided.profile(trainer, folder=options.job_log_dir, to=options.save)
  if jax.process_index() == 0:
    show = profile_page.as_json if options.json else profile_page.text
    print(show(found, trainer))
  return 0


if __name__ == "__main__":
  run()
