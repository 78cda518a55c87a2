# SPDX-License-Identifier: Apache-2.0
"""The program: flags -> experiment -> graph -> trainer -> the mode."""

import contextlib
import json
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paxlike import (
  cluster,
  console,
  flags,
  stacks,
  starting,
  topology,
  unexpected,
  usage,
)
from paxlike.errors import RunError, TemporaryError, UserError, one_line

if TYPE_CHECKING:
  from paxlike.experiment import Experiment

_TEMPORARY = 75  # EX_TEMPFAIL of sysexits.h: a launcher shall start the job again.
# Exceptions whose frames must live on until the process ends: XLA may still compile, and would
# crash without what they hold.
_interrupted: list[BaseException] = []


def run():
  """Entry point of the `paxlike` command."""
  console.outlive_readers()
  sys.unraisablehook = _report_unraisable
  # Where reading or writing a checkpoint fails, Orbax abandons what it has not begun.
  warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)
  # Where the disk is full a line for each would hide what the run itself says of that.
  warnings.filterwarnings("ignore", "Error .* persistent compilation cache entry")
  status = 1
  stacks.obey_sigterm()
  try:
    with stacks.on_signal():
      status = main(sys.argv)
  finally:
    alone = "paxlike.distributed" not in sys.modules
    if status == 130 or (status in (1, 2, 3, _TEMPORARY) and not alone):
      # JAX would wait for the other processes, which end by themselves; and `_interrupted` must not
      # be freed.
      if sys.exc_info()[1] is not None:
        traceback.print_exc()
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(status)
  sys.exit(status)


def _report_unraisable(error: Any):
  # When a write fails, TensorStore tells of the other writes to an event loop that is closed by
  # then; when a read fails, Orbax drops the coroutines of the other reads, which says Python.
  dropped = "orbax" in getattr(getattr(error.object, "cr_code", None), "co_filename", "")
  if str(error.exc_value) != "Event loop is closed" and not dropped:
    sys.__unraisablehook__(error)


def main(argv: Sequence[str]) -> int:
  """Runs a command line.

  Returns the exit status: 1 if the run or a check failed, 2 for a user's mistake, 3 for a step that
  was only compiled or planned and does not fit into the memory of its devices, 75 if another start
  may help.
  """
  options = flags.Options(traceback="--traceback" in argv)
  try:
    options = flags.parse(argv)
    if options.help:
      print(usage.HELP, end="")
      return _with_output(0)
    with _among_others(), unexpected.explained(options) as stage:
      status = _dispatch(options, stage)
      prints_only = options.list or options.fdl_help
      writes_files = options.mode in ("train", "eval", "decode") and not prints_only
      return status if writes_files else _with_output(status)
  except (UserError, RunError) as error:
    if options.traceback:
      traceback.print_exception(error)
    print(f"paxlike: {one_line(error)}", file=sys.stderr)
    if isinstance(error, UserError):
      return 2
    return _TEMPORARY if isinstance(error, TemporaryError) else 1
  except KeyboardInterrupt as error:
    _interrupted.append(error)
    return 130


def _with_output(status: int) -> int:
  """Returns the status of a program whose output is all that it gives: 1 if that was lost."""
  return 1 if console.output_is_lost() else status


@contextlib.contextmanager
def _among_others():
  """Context of the work of one of several processes: they shall know how it ends."""
  try:
    yield
  except BaseException as error:
    if others := sys.modules.get("paxlike.distributed"):
      others.fail(error)
    raise
  if others := sys.modules.get("paxlike.distributed"):
    others.leave()


def _dispatch(options: flags.Options, stage: unexpected.Stage) -> int:
  starting.set_up_jax(options)
  stage.attempt = _attempt
  from paxlike import show

  if options.list:
    print(show.experiments())
    return 0
  experiment = _experiment_if_named(options)
  if options.fdl_help:
    assert experiment is not None
    print(show.knob_help(type(experiment)))
    return 0
  if options.mode == "plan":
    assert experiment is not None
    return _plan(options, experiment)
  graph = graph_of(options, experiment)
  if options.mode == "show":
    if options.against:
      from paxlike import registry

      other = _graph(registry.find(options.against, flag="against")())
      print(show.difference(graph, other, name=options.against))
    else:
      print(show.everything(experiment, graph))
    return 0
  if options.mode == "compile":
    return _compile(options, built(graph))
  if options.mode == "check":
    from paxlike import check_page, checks

    folder = options.job_log_dir if options.enable_checkpoint_saving else None
    found = checks.run(graph, built, folder=folder, full=options.full)
    return check_page.show(found, as_json=options.json)
  trainer = built(graph)
  with trainer.watched():
    return _run(options, experiment, graph, trainer, stage)


def _attempt(options: flags.Options):
  """Builds and checks what options describe, and nothing else."""
  experiment = _experiment_if_named(options)
  trainer = built(graph_of(options, experiment))
  if options.mode not in ("decode", "show"):
    trainer.check(training=options.mode != "eval")
  if options.mode == "train" and trainer.num_steps:
    trainer.trace()


def _experiment_if_named(options: flags.Options) -> "Experiment | None":
  # Knobs without an experiment are those of the run in the folder.
  is_named = options.fdl_config or (options.knobs and not options.fdl_config_file)
  return experiment_of(options) if is_named else None


def experiment_of(options: flags.Options) -> "Experiment":
  """Returns the experiment that options name, its knobs set.

  Raises:
    UserError: There is no such experiment or knob, or a value is wrong.
  """
  from paxlike import registry, run_folder, saved_experiment

  if options.fdl_config is None:
    assert options.job_log_dir is not None
    return saved_experiment.read(run_folder.existing(options.job_log_dir), options.knobs)
  experiment = registry.find(options.fdl_config)()
  for name, text in options.knobs:
    experiment.set(name, text, source="command line")
  return experiment


def graph_of(options: flags.Options, experiment: "Experiment | None") -> Any:
  """Returns the root graph of an experiment, or of a file, with the edits of the options.

  Raises:
    UserError: The experiment never reads a knob that was set, or an edit is wrong.
  """
  from paxlike import config_file, fiddlers, run_folder, saved_experiment

  if experiment is None:
    path = options.fdl_config_file
    if path is None:
      assert options.job_log_dir is not None
      path = run_folder.existing(options.job_log_dir) / "config.json"
    with run_folder.reading(path):
      graph = config_file.read(path, allow_modules=options.fdl_allow_modules)
  else:
    graph = _graph(experiment)
    given = experiment.settings()
    for name in experiment.unread():
      if given[name].source != saved_experiment.FILE:
        which = _enabling(experiment, name)
        raise UserError(f"{name} has no effect with the other knobs as they are{which}.")
  if options.mode == "decode":
    fiddlers.decoding(graph)
  for text in options.fiddlers:
    graph = config_file.call_fiddler(graph, text, fiddlers.FIDDLERS)
  for path, text in options.edits:
    config_file.set_path(graph, path, text)
  return graph


def _graph(experiment: "Experiment") -> Any:
  from paxlike import building
  from paxlike.trainer import Trainer

  graph = experiment.trainer()
  source = f"what {type(experiment).__name__}.trainer() returns"
  building.check_kind(graph, Trainer, source=source)
  return graph


def _enabling(experiment: "Experiment", name: str) -> str:
  """Returns in words a choice of another knob with which knob `name` is read, if there is one."""
  from paxlike import knob_text, knob_types

  for other, knob in type(experiment).knobs().items():
    choices = knob_types.choices(knob.type) if other in experiment.read_names() else []
    for choice in choices:
      one = type(experiment)()
      settings = {n: setting.value for n, setting in experiment.settings().items()}
      for given, value in {**settings, other: choice}.items():
        one.set(given, value, source="trial")
      unexpected.failure(one.trainer)  # It may have read the knob all the same.
      if name in one.read_names():
        return f": {other}={knob_text.spell(choice)} would give it one"
  return ""


def _compile(options: flags.Options, trainer: Any) -> int:
  """Compiles the step and tells of it. Returns 3 if devices have too little memory for it."""
  from paxlike import aot, compile_page

  if options.kernels:
    aot.check_kernels(trainer)
  program = aot.compile_step(trainer, save=options.save)
  if options.json:
    print(json.dumps(compile_page.facts(trainer, program, with_kernels=options.kernels)))
  else:
    print(compile_page.text(trainer, program, with_kernels=options.kernels))
  if options.save is not None and program.step is None:
    print(f"paxlike: --save={options.save}: there is no step to save", file=sys.stderr)
  return 0 if program.fits else 3


def _plan(options: flags.Options, experiment: "Experiment") -> int:
  """Tells how to spread the experiment over devices. Returns 3 if nothing fits."""
  from paxlike import plan_page, planner

  def build(knobs: Mapping[str, Any]) -> Any:
    one = experiment_of(options)
    for name, value in knobs.items():
      one.set(name, value, source="plan")
    return built(graph_of(options, one))

  def command(plan: planner.Plan) -> str:
    now = {name: setting.value for name, setting in experiment.values().items()}
    own = [f"--fdl.{name}={text}" for name, text in options.knobs if name not in plan.how.knobs]
    own += [f"--fiddler={text}" for text in options.fiddlers]
    own += [f"--fdl.{path}={text}" for path, text in options.edits]
    words = [f"--fdl_config={options.fdl_config}", *own, "--mode=compile"]
    words += [] if options.topology is None else [f"--topology={options.topology}"]
    words += [] if options.slices is None else [f"--slices={options.slices}"]
    # What the command line has set is set by the plan.
    chosen = plan_page.flags(plan, {n: v for n, v in now.items() if n not in experiment.settings()})
    return " ".join(["paxlike", *map(shlex.quote, words), *chosen])

  for name, text in options.knobs:
    if name in planner.CHOSEN:
      raise UserError(f"--mode=plan chooses {name}: leave --fdl.{name} out.")
    if name == "OPTIMIZER_ON_HOST":
      raise UserError(f"--mode=plan does not know what {name}={text} takes: leave it out.")
  topology.take_gpu_memory()  # The same for all plans.
  plans = planner.find(build, topology.devices(), batch=options.global_batch)
  plans = planner.confirmed(plans, build, options.confirm or 0)
  if options.json:
    print(json.dumps(plan_page.facts(plans, command)))
  else:
    print(plan_page.text(plans, command))
  return 0 if plans.first is not None else 3


def _check(options: flags.Options, graph: Any, trainer: Any) -> tuple[Any, Any]:
  """Checks all that may refuse a run, together with the other processes; writes nothing.

  Returns the prompts and how to decode, for --mode=decode.
  """
  from paxlike import aot, config_file, decode_options, progress

  others = sys.modules.get("paxlike.distributed")
  progress.enter("compare")
  if others:
    others.compare(config_file.values(graph))
  progress.enter("check")
  trainer.saving = trainer.saving and options.enable_checkpoint_saving
  if options.mode != "decode":
    trainer.check(training=options.mode == "train")
  if options.compiled_step is not None:
    trainer.compiled_step = aot.load_step(trainer, options.compiled_step)
  elif options.mode == "train" and trainer.num_steps:
    with console.mentioned("tracing the step"):
      trainer.trace()
  decoding = decode_options.read(options) if options.mode == "decode" else ([], None)
  progress.enter("meet")
  if others:
    others.compare()
  return decoding


def _run(
  options: flags.Options,
  experiment: "Experiment | None",
  graph: Any,
  trainer: Any,
  stage: unexpected.Stage,
) -> int:
  from paxlike import following, ownership, run_folder
  from paxlike.journal import Journal

  assert options.job_log_dir is not None
  prompts, how = _check(options, graph, trainer)
  stage.is_over = True
  # A model that a run would start from can be evaluated in a new folder.
  is_new = options.mode == "train" or (options.mode == "eval" and trainer.restore is not None)
  with contextlib.ExitStack() as stack:
    if not is_new:
      folder = run_folder.existing(options.job_log_dir)
    else:
      folder = stack.enter_context(run_folder.entered(options.job_log_dir))
    others = sys.modules.get("paxlike.distributed")
    if others and options.mode == "train" and trainer.saving:
      others.check_shared(folder)
    # What evaluates and decodes writes files of its own, as a whole.
    owned = options.mode == "train"
    owner = stack.enter_context(ownership.owned(folder)) if owned else contextlib.nullcontext()
    journal = stack.enter_context(
      Journal(
        folder,
        write_summaries=options.enable_summary_writer,
        check_owner=getattr(owner, "check", lambda: None),
      )
    )
    if options.mode != "train":
      of = " of prompts" if options.mode == "decode" else ""
      journal.note(f"attention{of}: {', '.join(trainer.attention)}")
      journal.note(f"computes in {trainer.compute_dtype}")
    if options.mode == "eval" and options.continuous:
      following.follow(trainer, folder, journal)
    elif options.mode == "eval":
      trainer.evaluate(folder, journal, step=_step(options, folder))
    elif options.mode == "decode":
      trainer.decode(folder, journal, prompts, step=_step(options, folder), options=how)
    else:
      with run_folder.reading(folder / "config.json"):
        _tell_changes(folder / "config.json", graph, journal)
      stopped_by = trainer.train(folder, journal, files=_files(experiment, graph))
      return 128 + stopped_by if stopped_by else 0
  return 0


def built(graph: Any) -> Any:
  """Returns the trainer with the options of its devices; tells of those that JAX does not know."""
  from paxlike import building
  from paxlike.scripts_gpu import xla_flags

  several = cluster.num_gpus() > 1 or "paxlike.distributed" in sys.modules
  # The mesh before the rest, of which stacks ask for devices.
  mesh = building.build(graph.mesh, source="mesh") if several else None
  topology.take_gpu_memory(0 if mesh is None else mesh.num_groups)
  trainer: Any = building.build(graph)
  trainer.compiler_options, dropped = xla_flags.options()
  for name in dropped:
    print(f"paxlike: this JAX has no option {name}: left out", file=sys.stderr)
  return trainer


def _step(options: flags.Options, folder: Any) -> int | None:
  """Returns the checkpoint that the options name; None for the newest."""
  from paxlike import best

  return best.step_of(folder) if options.step == "best" else options.step


def _files(experiment: "Experiment | None", graph: Any) -> dict[str, str]:
  """Returns what a run's folder says of its configuration."""
  from paxlike import config_file, registry

  files = {"config.json": config_file.dump(graph), "config.txt": config_file.describe(graph)}
  if experiment is not None:
    files["experiment.json"] = registry.dump(experiment)
  return files


def _tell_changes(path: Any, graph: Any, journal: Any):
  """Prints what has changed in the graph since the run began, if anything has."""
  from paxlike import config_file

  if not path.exists():
    return
  try:
    before = config_file.read_data(path)
  except UserError as error:
    journal.note(f"cannot be compared with how the run began: {error}")
    return
  if changes := config_file.difference(before, graph):
    journal.note(f"changed since the run began:\n{changes}")


if __name__ == "__main__":
  run()
