# SPDX-License-Identifier: Apache-2.0
"""The program: flags -> experiment -> graph -> trainer -> the mode."""

import contextlib
import json
import logging
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
  gpu_targets,
  memory,
  topology,
  tpu_targets,
  unexpected,
  usage,
)
from paxlike.errors import RunError, TemporaryError, UserError

if TYPE_CHECKING:
  from paxlike.experiment import Experiment

_TEMPORARY = 75  # EX_TEMPFAIL of sysexits.h: a launcher shall start the job again.
_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"  # By which users name a folder of compiled programs.
# Kept with their frames until the process ends: XLA may still compile, and would crash without what
# they hold.
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
  try:
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
  # When a write fails, TensorStore tells of the others to an event loop that is gone by then; when
  # a read fails, Orbax drops the others.
  dropped = "orbax" in getattr(getattr(error.object, "cr_code", None), "co_filename", "")
  if str(error.exc_value) != "Event loop is closed" and not dropped:
    sys.__unraisablehook__(error)


def main(argv: Sequence[str]) -> int:
  """Runs a command line.

  Returns the exit status: 1 if the run or a check failed, 2 for a user's mistake, 3 for a step that
  was only compiled or planned and does not fit into the memory of its devices, 75 if another start
  may help.
  """
  options = flags.Options()
  try:
    options = flags.parse(argv)
    if options.help:
      print(usage.HELP, end="")
      return 0
    with _among_others(), unexpected.explained(options) as stage:
      return _dispatch(options, stage)
  except (UserError, RunError) as error:
    if options.traceback:
      traceback.print_exception(error)
    print(f"paxlike: {error}", file=sys.stderr)
    if isinstance(error, UserError):
      return 2
    return _TEMPORARY if isinstance(error, TemporaryError) else 1
  except KeyboardInterrupt as error:
    _interrupted.append(error)
    return 130


@contextlib.contextmanager
def _among_others():
  """Context of the work of one of several processes: they shall know how it ends."""
  try:
    yield
  except BaseException as error:
    if others := sys.modules.get("paxlike.distributed"):
      if not isinstance(error, UserError | RunError | KeyboardInterrupt):
        others.wait_for_watch()  # What failed may have needed a process that is gone.
      others.leave(failed=True, reason=(str(error) or repr(error)).splitlines()[0][:300])
    raise
  if others := sys.modules.get("paxlike.distributed"):
    others.leave(failed=False)


def _dispatch(options: flags.Options, stage: unexpected.Stage) -> int:
  set_up_jax(options)
  stage.attempt = _attempt
  from paxlike import show

  if options.list:
    print(show.experiments())
    return 0
  # Knobs without an experiment are those of the run in the folder.
  is_named = options.fdl_config or (options.knobs and not options.fdl_config_file)
  experiment = experiment_of(options) if is_named else None
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

      other = registry.find(options.against)().trainer()
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
  return _run(options, experiment, graph, stage)


def _attempt(options: flags.Options):
  """Builds and checks what options describe, and nothing else."""
  experiment = None if options.fdl_config is None else experiment_of(options)
  trainer = built(graph_of(options, experiment))
  if options.mode not in ("decode", "show"):
    trainer.check(training=options.mode != "eval")


def set_up_jax(options: flags.Options):
  """Sets what JAX, TensorFlow and TFDS read when they are first used."""
  # JAX and its libraries are imported here, after the flags have been found good.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  # Orbax and gcsfs log each error that they also raise, with all its stack; asyncio those that it
  # need not.
  for name in ("absl", "asyncio", "gcsfs"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  if options.tfds_data_dir:
    os.environ["TFDS_DATA_DIR"] = options.tfds_data_dir
  topology.check_gpu_share()
  if not os.path.exists("/dev/nvidiactl"):
    # What compiles for GPUs may be installed where there is none: JAX would log that as an error.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  if options.topology is not None and tpu_targets.are_named(options.topology):
    gpu_targets.leave_out()
  if not tpu_targets.are_here():
    tpu_targets.settle()
    if options.topology is None and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
      memory.keep_heap()
  if options.num_cpu_devices is not None or os.environ.get("JAX_PLATFORMS") == "cpu":
    # XLA for CPUs ends the process when it makes some sums of bfloat16 over devices float32: those
    # of gradients of jax.shard_map. It needs not do so, they are summed well as they are.
    theirs = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_disable_hlo_passes=all-reduce-promotion {theirs}".strip()
  _keep_programs()
  import jax

  if options.topology is not None:
    jax.config.update("jax_platforms", "cpu")
  topology.use(options.topology, slices=options.slices or 1)
  if options.num_cpu_devices is not None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.num_cpu_devices)
    # XLA's threads: where there are few, those that wait in different collectives lock each other.
    os.environ.setdefault("NPROC", str(8 * options.num_cpu_devices))
  _join(options)


def _join(options: flags.Options):
  """Joins the other processes of the job, if options or the cluster tell of any."""
  if options.topology is not None:
    return
  on_cpu = {} if options.num_cpu_devices is None else {"JAX_PLATFORMS": "cpu"}
  environ = os.environ | on_cpu
  given: Any = (options.server_addr, options.num_hosts, options.host_idx)
  is_told = None not in given
  if is_told:
    group = cluster.Group(*given, devices=cluster.own_gpus(environ))
  else:
    group = cluster.found(environ)
  of_tpus = tpu_targets.are_here() and not is_told
  if options.multiprocess_gpu and group is None and not of_tpus:
    raise UserError(
      "--multiprocess_gpu: no cluster tells of other processes (Slurm, Open MPI, Kubernetes, TPUs):"
      " give --server_addr=HOST:PORT --num_hosts=N --host_idx=I."
    )
  if group is None and of_tpus:
    joins = options.multiprocess_gpu or cluster.num_tpu_processes() > 1
  else:
    joins = group is not None and group.count > 1
  if joins:
    from paxlike import distributed

    distributed.initialize(
      group,
      timeout=60 if options.heartbeat_timeout is None else options.heartbeat_timeout,
      join_timeout=300 if options.join_timeout is None else options.join_timeout,
      told=flags.shared(options),
    )
    has_gpus = cluster.num_gpus() and environ.get("JAX_PLATFORMS") != "cpu"
    several_nodes = group is not None and cluster.local(environ)[1] < group.count
    if has_gpus and several_nodes and _PROGRAMS not in environ:
      _keep_no_programs()


def _keep_no_programs():
  """Has JAX compile all programs anew: on GPUs of several nodes, each process waits for all others.

  They share the measuring of matmuls (`xla_gpu_shard_autotuning`, on by default; XLA's pull
  requests 14968 and 22164). JAX writes the cache from process 0 alone (jax/_src/compiler.py): with
  disks of their own, process 0 would find after a restart what the others wait for it to measure. A
  folder that the user names is taken to be one that all processes share.
  """
  import jax

  jax.config.update("jax_enable_compilation_cache", False)


def _keep_programs():
  """Lets what was compiled once be read from the cache folder, unless the user says otherwise."""
  # Also the many small ones, which together take as long as the step on a small machine.
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
  import jax

  from paxlike.data import token_index

  if _PROGRAMS not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(token_index.cache_folder() / "xla"))


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
  from paxlike.errors import did_you_mean

  if experiment is None:
    path = options.fdl_config_file
    if path is None:
      assert options.job_log_dir is not None
      path = run_folder.existing(options.job_log_dir) / "config.json"
    with run_folder.reading(path):
      graph = config_file.read(path, allow_modules=options.fdl_allow_modules)
  else:
    graph = experiment.trainer()
    given = experiment.settings()
    for name in experiment.unread():
      if given[name].source == saved_experiment.FILE:
        continue
      hint = did_you_mean(name, experiment.read_names())
      raise UserError(f"{name} has no effect: {type(experiment).__name__} never reads it.{hint}")
  if options.mode == "decode":
    fiddlers.decoding(graph)
  for text in options.fiddlers:
    graph = config_file.call_fiddler(graph, text, fiddlers.FIDDLERS)
  for path, text in options.edits:
    config_file.set_path(graph, path, text)
  return graph


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


def _run(
  options: flags.Options, experiment: "Experiment | None", graph: Any, stage: unexpected.Stage
) -> int:
  from paxlike import aot, decode_options, ownership, run_folder
  from paxlike.journal import Journal

  assert options.job_log_dir is not None
  trainer = built(graph)
  trainer.saving = options.enable_checkpoint_saving
  if options.mode != "decode":
    trainer.check(training=options.mode == "train")
  if options.compiled_step is not None:
    trainer.compiled_step = aot.load_step(trainer, options.compiled_step)
  elif options.mode == "train" and trainer.num_steps:
    trainer.trace()
  read = decode_options.read(options) if options.mode == "decode" else ([], None)
  stage.ends()
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
      trainer.follow(folder, journal)
    elif options.mode == "eval":
      trainer.evaluate(folder, journal, step=_step(options, folder))
    elif options.mode == "decode":
      prompts, how = read
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
  topology.take_gpu_memory(building.build(graph.mesh).num_groups if several else 0)
  trainer: Any = building.build(graph)
  trainer.compiler_options = xla_flags.joined(trainer.compiler_options)
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
  """Prints how the graph differs from that with which the run began, if it has."""
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
