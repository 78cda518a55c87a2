# SPDX-License-Identifier: Apache-2.0
"""The command-line flags, and their parsing.

`--fdl.PATH=VALUE` sets a knob of the experiment if PATH is UPPER_CASE, and a value in its graph if
it is lower_case. Imports are light, so that `--help` and errors print at once.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from absl import flags

from paxlike.cli.usage import CHECKED, MODES
from paxlike.config import knob_types, ranges
from paxlike.errors import UserError, did_you_mean

_DECODE = (
  *("prompt", "prompt_file", "max_new_tokens", "num_samples", "stop", "stop_token", "decode_rows"),
  *("temperature", "top_k", "top_p", "min_p", "decode_seed"),
)
# Sampling flags, without effect at temperature 0.
_SAMPLING = ("top_k", "top_p", "min_p", "decode_seed")
# Flag -> the modes that use it. The flags under "How to run" in `--help` are accepted in all modes,
# so that --mode=show or compile can be added to the command of a run.
_ONLY_IN = {
  "against": ("show",),
  "changed": ("show",),
  "topology": ("show", "compile", "plan"),
  "slices": ("show", "compile", "plan"),
  "kernels": ("compile",),
  "json": ("check", "compile", "plan"),
  "full": ("check",),
  "global_batch": ("plan",),
  "confirm": ("plan",),
  "save": ("compile",),
  "compiled_step": ("train",),
  "continuous": ("eval",),
  "chat": ("decode",),
  "step": ("eval", "decode"),
  **dict.fromkeys(_DECODE, ("decode",)),
}

_ASSIGNMENT = re.compile(r"((?:[^=\[]|\[[^\]]*\])+)=(.*)", re.DOTALL)
_FDL = re.compile(r"--?fdl\.(.*)", re.DOTALL)
# Flags that absl itself defines: more flags from a file, and unknown flags to ignore.
_OF_ABSL = re.compile(r"--?(flagfile|undefok)(=.*)?", re.DOTALL)
_KNOB = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The command line, checked as far as it can be without an experiment.

  Attributes:
    mode: One of MODES.
    fdl_config: Name of the experiment (`--fdl_config` or `--exp`); check has a default.
    fdl_config_file: Path of a saved graph, given instead of `fdl_config`.
    knobs: (KNOB, text) in the order given.
    edits: (path in the graph, text) in the order given.
    fiddlers: Calls such as "use_fp8(margin=1)", in the order given.
    job_log_dir: Folder of the run; needed in train, eval and decode.
    against: Name of an experiment to compare with.
    changed: Print only the knobs that differ from the defaults of the experiment's family.
    topology: Name of the devices to compile for; None: those of this machine.
    slices: Number of TPU slices of that topology; None: 1.
    kernels: Print the kernels of the compiled step.
    json: Print the results of check, compile or plan as JSON.
    full: Check the step of the full-size model instead of a shrunk one.
    global_batch: The global batch to plan for, in sequences; None: the experiment's.
    confirm: Number of best plans to compile; None: 0.
    save: File to write the compiled step to.
    compiled_step: File of the compiled step to train with.
    traceback: Also print the traceback of the error that ends the program.
    help: Print usage.HELP and stop.
    fdl_help: Print the knobs of the experiment and stop.
    list: Print the registered experiments and stop.
    step: Step of the checkpoint to evaluate or decode with; None: the newest.
    continuous: Evaluate the checkpoints of a running job as they appear.
    chat: Hold a conversation in the terminal.
    prompt: Prompts to continue.
    prompt_file: Files of prompts.
    max_new_tokens: Maximum length of a sample, as in `decoding.Options`; None: its default.
    temperature, top_k, top_p, min_p: See `sampling.Sampling`; None: its default.
    num_samples: Samples per prompt; None: the default of `decoding.Options`.
    stop: Strings that end a sample.
    stop_token: Token ids that end a sample.
    decode_rows: Maximum number of decode slots; None: the default of `decoding.Options`.
    decode_seed: Seed of sampling; None: the default of `decoding.Options`.
    fdl_allow_modules: Modules that a graph from a file may use besides paxlike's.
    enable_checkpoint_saving: Write checkpoints.
    enable_summary_writer: Write metrics files.
    multiprocess_gpu: Raise an error if neither flags nor the cluster give the job's processes.
    server_addr: HOST:PORT of process 0.
    num_hosts: Number of processes.
    host_idx: Index of this process.
    heartbeat_timeout: Seconds without a heartbeat after which a process counts as lost.
    join_timeout: Seconds in which all processes must join.
    tfds_data_dir: Folder of TFDS datasets.
    num_cpu_devices: Number of fake CPU devices to run on.
  """

  mode: str = "train"
  fdl_config: str | None = None
  fdl_config_file: str | None = None
  knobs: tuple[tuple[str, str], ...] = ()
  edits: tuple[tuple[str, str], ...] = ()
  fiddlers: tuple[str, ...] = ()
  job_log_dir: str | None = None
  against: str | None = None
  changed: bool = False
  topology: str | None = None
  slices: int | None = None
  kernels: bool = False
  json: bool = False
  full: bool = False
  global_batch: int | None = None
  confirm: int | None = None
  save: str | None = None
  compiled_step: str | None = None
  traceback: bool = False
  help: bool = False
  fdl_help: bool = False
  list: bool = False
  step: int | Literal["best"] | None = None
  continuous: bool = False
  chat: bool = False
  prompt: tuple[str, ...] = ()
  prompt_file: tuple[str, ...] = ()
  max_new_tokens: int | None = None
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  num_samples: int | None = None
  stop: tuple[str, ...] = ()
  stop_token: tuple[int, ...] = ()
  decode_rows: int | None = None
  decode_seed: int | None = None
  fdl_allow_modules: tuple[str, ...] = ()
  enable_checkpoint_saving: bool = True
  enable_summary_writer: bool = True
  multiprocess_gpu: bool = False
  server_addr: str | None = None
  num_hosts: int | None = None
  host_idx: int | None = None
  heartbeat_timeout: int | None = None
  join_timeout: int | None = None
  tfds_data_dir: str | None = None
  num_cpu_devices: int | None = None


def parse(argv: Sequence[str]) -> Options:
  """Returns the options that a command line gives.

  Args:
    argv: The program's name and its arguments, as in `sys.argv`.

  Raises:
    UserError: A flag is unknown, has a bad value, contradicts another, or is missing.
  """
  values = _define()
  try:
    rest = values([argv[0] if argv else "paxlike", *_rewrite(argv[1:])])[1:]
  except flags.UnrecognizedFlagError as error:
    from paxlike.cli import hints  # Here: it imports all experiments.

    known = [name for name in values if name not in ("h", "fdl_set")]
    hint = hints.of_flag(error.flagname, argv, known)
    raise UserError(f"unknown flag --{error.flagname}.{hint}") from None
  except flags.Error as error:
    raise UserError(str(error).removeprefix("flag ").replace("\n", " ")) from None
  if rest:
    hint = "" if rest[0].lower() not in ("true", "false") else " Give a bool as --flag=true."
    raise UserError(f"unexpected argument {rest[0]!r}: flags start with '--'.{hint}")
  given: dict[str, Any] = values.flag_values_dict()
  knobs, edits = _split_by_case(given["fdl_set"])
  if given["exp"] and given["fdl_config"] not in (None, given["exp"]):
    raise UserError(
      f"--exp={given['exp']} and --fdl_config={given['fdl_config']} name different experiments."
    )
  default = CHECKED if given["mode"] == "check" and not given["fdl_config_file"] else None
  options = Options(
    **{name: given[name] for name in _SCALARS if name != "fdl_config"},
    fdl_config=given["fdl_config"] or given["exp"] or default,
    knobs=knobs,
    edits=edits,
    fiddlers=tuple(given["fiddler"]),
    prompt=tuple(given["prompt"]),
    prompt_file=tuple(given["prompt_file"]),
    stop=tuple(given["stop"]),
    stop_token=tuple(given["stop_token"]),
    help=given["help"] or given["h"],
    fdl_allow_modules=tuple(filter(None, ",".join(given["fdl_allow_modules"]).split(","))),
  )
  if not options.help:
    _check(options)
  return options


def shared(options: Options) -> dict[str, str]:
  """Returns flag -> text of the flags that must be equal in all processes of a job.

  Flags with paths are left out: paths may differ between machines.
  """
  names = ("mode", "fdl_config", "enable_checkpoint_saving", "step", "num_cpu_devices", *_DECODE)
  given = {f"--{name}": str(getattr(options, name)) for name in names if name != "prompt_file"}
  paths = ("PATH", "DIR", ".path")
  for path, text in (*options.knobs, *options.edits):
    if not path.endswith(paths):
      given[f"--fdl.{path}"] = text
  if options.fiddlers:
    given["--fiddler"] = ", ".join(options.fiddlers)
  return {name: text for name, text in given.items() if text not in ("None", "()")}


class _Bool(flags.BooleanParser):
  """absl's parser with a one-line error message."""

  def parse(self, argument: str | int) -> bool:
    try:
      return super().parse(argument)
    except ValueError:
      raise ValueError(f"expected true or false, got {argument!r}.") from None


class _Number(flags.ArgumentParser):
  """A parser of numbers of a type with a range, by `knob_types`."""

  syntactic_help = "a number"

  def __init__(self, kind: Any):
    super().__init__()
    self._kind = kind

  def parse(self, argument: str | int) -> Any:
    return knob_types.convert(self._kind, argument, text=isinstance(argument, str))


class _Text(flags.ArgumentParser):
  """A parser of non-empty text."""

  syntactic_help = "a text"

  def parse(self, argument: str) -> str:
    if not argument:
      raise ValueError("expected a non-empty text.")
    return argument


class _Step(_Number):
  """A parser of the step of a checkpoint, or "best"."""

  def parse(self, argument: str | int) -> int | str:
    return argument if argument == "best" else super().parse(argument)


_STRINGS = (
  "fdl_config",
  "fdl_config_file",
  "job_log_dir",
  "against",
  "topology",
  "save",
  "compiled_step",
  "server_addr",
  "tfds_data_dir",
)
_BOOLEANS = {
  "fdl_help": False,
  "list": False,
  "changed": False,
  "continuous": False,
  "chat": False,
  "kernels": False,
  "json": False,
  "full": False,
  "traceback": False,
  "enable_checkpoint_saving": True,
  "enable_summary_writer": True,
  "multiprocess_gpu": False,
}
_COUNT = Annotated[int, ranges.Range(least=1, most=2**16)]
_NUMBERS = {
  "slices": _COUNT,
  "global_batch": ranges.Size,
  "confirm": Annotated[int, ranges.Range(least=0, most=1000)],
  "num_hosts": _COUNT,
  "host_idx": Annotated[int, ranges.Range(least=0, most=2**16)],
  "heartbeat_timeout": Annotated[int, ranges.Range(least=1, most=10**6)],
  "join_timeout": Annotated[int, ranges.Range(least=1, most=10**6)],
  "num_cpu_devices": Annotated[int, ranges.Range(least=1, most=1024)],
  "max_new_tokens": ranges.Size,
  "top_k": ranges.Size,
  "num_samples": _COUNT,
  "decode_rows": _COUNT,
  "decode_seed": ranges.NonNegative,
  "temperature": ranges.Temperature,
  "top_p": ranges.Share,
  "min_p": ranges.Share,
}
_PROCESSES = ("server_addr", "num_hosts", "host_idx")
_SCALARS = ("mode", "step", *_STRINGS, *_BOOLEANS, *_NUMBERS)


def _define() -> flags.FlagValues:
  """Defines the flags on their own FlagValues: the global ones have flags of libraries."""
  values = flags.FlagValues()
  # Flags may follow a stray argument, so that the error is about the argument.
  values.set_gnu_getopt(True)
  flags.DEFINE_string("mode", "train", "", flag_values=values)
  for name in (*_STRINGS, "exp"):
    flags.DEFINE(_Text(), name, None, "", flag_values=values)
  for name, default in {**_BOOLEANS, "help": False, "h": False}.items():
    flag = flags.BooleanFlag(name, default, "")
    flag.parser = _Bool()
    flags.DEFINE_flag(flag, flag_values=values)
  flags.DEFINE(_Step(ranges.NonNegative), "step", None, "", flag_values=values)
  for name, kind in _NUMBERS.items():
    flags.DEFINE(_Number(kind), name, None, "", flag_values=values)
  for name in ("fdl_set", "prompt"):
    flags.DEFINE_multi_string(name, [], "", flag_values=values)
  texts = dict.fromkeys(("fiddler", "fdl_allow_modules", "prompt_file", "stop"), _Text())
  for name, parser in {**texts, "stop_token": _Number(ranges.NonNegative)}.items():
    flags.DEFINE_multi(parser, flags.ArgumentSerializer(), name, [], "", flag_values=values)
  return values


def _rewrite(args: Sequence[str]) -> list[str]:
  """Turns `--fdl.PATH=VALUE` and `--fdl.PATH VALUE` into `--fdl_set=PATH=VALUE`, as Pax does."""
  rewritten = []
  remaining = iter(args)
  for arg in remaining:
    if arg == "--":
      rewritten += [arg, *remaining]
    elif match := _OF_ABSL.fullmatch(arg):
      raise UserError(f"unknown flag --{match[1]}. --help lists the flags.")
    elif match := _FDL.fullmatch(arg):
      assignment = match[1]
      _check_name(assignment, "--fdl.")
      if not _ASSIGNMENT.fullmatch(assignment):
        value = next(remaining, None)
        if value is None or value.startswith("--"):
          raise UserError(f"--fdl.{assignment} needs a value: --fdl.{assignment}=VALUE.")
        assignment = f"{assignment}={value}"
      rewritten.append(f"--fdl_set={assignment}")
    else:
      rewritten.append(arg)
  return rewritten


def _check_name(assignment: str, prefix: str):
  """Raises a UserError if there is no name before the "="."""
  if assignment.partition("=")[0].strip() in ("", "."):
    shown = assignment if len(assignment) <= 100 else f"{assignment[:100]}..."
    raise UserError(
      f"{prefix}{shown}: the name of a knob or a path is missing: {prefix}NAME=VALUE."
    )


def _split_by_case(
  assignments: Sequence[str],
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
  """Splits assignments into (KNOB, text) and (path, text) pairs."""
  knobs, edits = [], []
  for assignment in assignments:
    _check_name(assignment, "--fdl_set=")
    match = _ASSIGNMENT.fullmatch(assignment)
    if not match:
      raise UserError(f"--fdl_set={assignment}: expected PATH=VALUE.")
    path, text = match[1].strip(), match[2]
    first = re.split(r"[.\[]", path, maxsplit=1)[0]
    if _KNOB.fullmatch(path):
      knobs.append((path, text))
    elif _KNOB.fullmatch(first):
      raise UserError(f"--fdl.{path}: a knob cannot be set in part: give --fdl.{first}=VALUE.")
    elif first != first.lower():
      raise UserError(f"--fdl.{path}: knobs are UPPER_CASE, paths in the graph lower_case.")
    else:
      edits.append((path, text))
  return tuple(knobs), tuple(edits)


def _check(options: Options):
  if options.mode not in MODES:
    hint = did_you_mean(options.mode, MODES)
    raise UserError(f"--mode={options.mode}: expected one of {', '.join(MODES)}.{hint}")
  for name, modes in _ONLY_IN.items():
    if getattr(options, name) != getattr(Options, name) and options.mode not in modes:
      mode = " or ".join(f"--mode={mode}" for mode in modes if mode in MODES)
      raise UserError(f"--{name} goes with {mode}, not --mode={options.mode}.")
  if options.list:
    return
  if options.fdl_config and options.fdl_config_file:
    raise UserError("give --fdl_config or --fdl_config_file, not both.")
  of_the_run = options.job_log_dir and (options.mode in ("eval", "decode") or options.fdl_help)
  if not options.fdl_config and not options.fdl_config_file and not of_the_run:
    from paxlike.cli import hints

    here = "" if options.mode == "plan" else hints.of_run(options.job_log_dir)
    raise UserError(f"which experiment? Give --fdl_config=NAME; --list shows the names.{here}")
  if options.fdl_config_file and options.knobs:
    name, text = options.knobs[0]
    raise UserError(
      f"--fdl.{name}={text}: a graph from --fdl_config_file has no knobs; set its values by"
      " their paths (--fdl.path.to=VALUE, --mode=show lists them)."
    )
  if options.fdl_config_file and options.fdl_help:
    raise UserError("--fdl_help lists the knobs of an experiment: give --fdl_config=NAME.")
  if options.changed and options.fdl_config is None:
    raise UserError("--changed compares knobs, and a graph file has none: give --fdl_config=NAME.")
  if options.changed and options.against is not None:
    raise UserError(
      f"--changed compares with the family, --against={options.against} with another experiment:"
      " leave one out."
    )
  if options.fdl_allow_modules and options.fdl_config:
    raise UserError(
      "--fdl_allow_modules only applies to a graph from a file, that of --fdl_config_file=FILE or"
      f" of a run: leave it out, or --fdl_config={options.fdl_config}."
    )
  if options.slices is not None and options.topology is None:
    raise UserError(f"--slices={options.slices} goes with --topology=NAME.")
  if options.topology is not None and options.num_cpu_devices is not None:
    raise UserError(
      f"--topology={options.topology} and --num_cpu_devices={options.num_cpu_devices} name"
      " different devices: leave one out."
    )
  if options.continuous and options.step is not None:
    raise UserError(
      f"--continuous evaluates all checkpoints, --step={options.step} one: leave one out."
    )
  for name in _SAMPLING:
    if getattr(options, name) is not None and not options.temperature:
      raise UserError(
        f"--{name}={getattr(options, name)} needs a --temperature above 0: 0, the default, is"
        " greedy decoding."
      )
  if options.mode == "plan" and options.fdl_config is None:
    raise UserError("--mode=plan sets knobs, and a graph file has none: give --fdl_config=NAME.")
  if options.chat and (options.prompt or options.prompt_file or options.num_samples):
    raise UserError("--chat reads the terminal: leave out --prompt... and --num_samples.")
  has_prompts = options.prompt or options.prompt_file or options.chat
  if options.mode == "decode" and not has_prompts:
    raise UserError("--mode=decode needs --prompt=TEXT, --prompt_file=FILE or --chat.")
  if (options.host_idx or 0) >= (options.num_hosts or float("inf")):
    raise UserError(
      f"--host_idx={options.host_idx} counts from 0, so it must be below"
      f" --num_hosts={options.num_hosts}."
    )
  given = [name for name in _PROCESSES if getattr(options, name) is not None]
  if given and len(given) < len(_PROCESSES):
    missing = [f"--{name}" for name in _PROCESSES if name not in given]
    raise UserError(f"--{given[0]} needs {' and '.join(missing)} too.")
  needs_folder = options.mode not in ("check", "show", "compile", "plan")
  if needs_folder and not options.job_log_dir and not options.fdl_help:
    raise UserError(f"--mode={options.mode} needs --job_log_dir=DIR, the folder of the run.")
