# SPDX-License-Identifier: Apache-2.0
"""The parsed command line (`Options`), and checks that its flags go together."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from paxlike.cli.usage import MODES
from paxlike.errors import UserError, did_you_mean

_DECODE = (
  *("prompt", "prompt_file", "max_new_tokens", "num_samples", "stop", "stop_token", "decode_rows"),
  *("temperature", "top_k", "top_p", "min_p", "decode_seed"),
)
# Sampling flags, without effect at temperature 0.
_SAMPLING = ("top_k", "top_p", "min_p", "decode_seed")
# Flag -> the modes that use it. The flags under "How to run" in `--help` are accepted in all modes,
# so that --mode=show or compile can be added to the command of a run.
ONLY_IN = {
  "against": ("show",),
  "changed": ("show",),
  "topology": ("show", "compile", "plan"),
  "slices": ("show", "compile", "plan"),
  "kernels": ("compile",),
  "json": ("check", "compile", "plan", "profile", "transfer"),
  "full": ("check",),
  "global_batch": ("plan",),
  "confirm": ("plan",),
  "tokens": ("plan",),
  "price": ("plan",),
  "target": ("plan",),
  "dcn_bandwidth": ("plan",),
  "calibrate": ("plan",),
  "save": ("compile", "profile", "transfer"),
  "widths": ("transfer",),
  "depths": ("transfer",),
  "rates": ("transfer",),
  "draws": ("transfer",),
  "compiled_step": ("train",),
  "pgle_profile": ("train", "compile"),
  "continuous": ("eval",),
  "chat": ("decode",),
  "step": ("eval", "decode"),
  **dict.fromkeys(_DECODE, ("decode",)),
}
_PROCESSES = ("server_addr", "num_hosts", "host_idx")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The command line, checked as far as it can be without an experiment.

  Attributes:
    mode: One of MODES.
    fdl_config: Name of the experiment (`--fdl_config` or `--exp`); check has a default.
    fdl_config_file: Path of a saved graph, given instead of `fdl_config`.
    knobs: (KNOB, text) in the order given.
    edits: (path in the graph, text) in the order given.
    fiddlers: Calls such as `quantize(kind="fp8")`, in the order given.
    job_log_dir: Folder of the run; needed in train, eval and decode.
    against: Name of an experiment to compare with.
    changed: Print only the knobs that differ from the defaults of the experiment's family.
    topology: Name of the devices to compile for, or for plan several, separated by commas; None:
      those of this machine.
    slices: Number of TPU slices of that topology; None: 1.
    kernels: Print the kernels of the compiled step.
    json: Print the results of check, compile, plan, profile or transfer as JSON.
    full: Check the step of the full-size model instead of a shrunk one.
    global_batch: The global batch to plan for, in sequences; None: the experiment's.
    confirm: Number of best plans to compile; None: 0.
    tokens: Length of a run whose time and cost are printed; None: they are not.
    price: Kind of device, such as h100 -> price of a device for an hour; "" stands for all.
    target: What the plans of several topologies are sorted by: "time" or "cost".
    dcn_bandwidth: Bytes/s that a device sends across slices or nodes; None: of the data sheet.
    calibrate: File of the kernels that --mode=profile has measured.
    save: File to write to: the compiled step, the measured durations of instructions, or a picture.
    widths: MODEL_DIMS of the models to compare, ascending; None: those of the coordinate check.
    depths: NUM_LAYERS of these models; None: the experiment's.
    rates: Learning rates to find the best of; None: check the coordinates instead.
    draws: Number of initial weights that each measurement is a mean over; None: one for each
      learning rate, and up to 8 for the coordinates of narrow models.
    compiled_step: File of the compiled step to train with.
    pgle_profile: File of such durations, by which XLA schedules the step.
    traceback: Also print the traceback of the error that ends the program.
    help: Print usage.HELP and stop.
    fdl_help: Print the knobs of the experiment and stop.
    list: Print the registered experiments and stop.
    step: Step of the checkpoint to evaluate or decode with, or "best"; None: the newest.
    continuous: Evaluate the checkpoints of a running job as they appear.
    chat: Hold a conversation in the terminal.
    prompt: Prompts to continue.
    prompt_file: Files of prompts.
    max_new_tokens: Maximum length of a sample; None: the default of `DecodingOptions`.
    temperature, top_k, top_p, min_p: See `sampling.Sampling`; None: its default.
    num_samples: Samples per prompt; None: the default of `DecodingOptions`.
    stop: Strings that end a sample.
    stop_token: Token ids that end a sample.
    decode_rows: Maximum number of decode slots; None: the default of `DecodingOptions`.
    decode_seed: Seed of sampling; None: the default of `DecodingOptions`.
    fdl_allow_modules: Modules that a graph from a file may use besides paxlike's.
    enable_checkpoint_saving: Write checkpoints.
    enable_summary_writer: Write metrics, to files and trackers.
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
  tokens: float | None = None
  price: Mapping[str, float] | None = None
  target: Literal["time", "cost"] = "time"
  dcn_bandwidth: float | None = None
  calibrate: str | None = None
  save: str | None = None
  widths: tuple[int, ...] | None = None
  depths: tuple[int, ...] | None = None
  rates: tuple[float, ...] | None = None
  draws: int | None = None
  compiled_step: str | None = None
  pgle_profile: str | None = None
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

  @property
  def topologies(self) -> tuple[str, ...]:
    """The names in `topology`."""
    return () if self.topology is None else tuple(self.topology.lower().split(","))


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


def check(options: Options):
  """Raises a UserError if flags contradict each other, or if one is missing."""
  if options.mode not in MODES:
    hint = did_you_mean(options.mode, MODES)
    raise UserError(f"--mode={options.mode}: expected one of {', '.join(MODES)}.{hint}")
  for name, modes in ONLY_IN.items():
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

    here = "" if options.mode in ("plan", "transfer") else hints.of_run(options.job_log_dir)
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
  _check_devices(options)
  if options.pgle_profile is not None and options.compiled_step is not None:
    raise UserError(
      f"--pgle_profile={options.pgle_profile} is for compiling, and --compiled_step is compiled:"
      " give it to --mode=compile --save=FILE instead."
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
  if options.mode == "plan":
    _check_plan(options)
  if options.mode == "transfer":
    _check_transfer(options)
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
  needs_folder = options.mode in ("train", "eval", "decode")
  if needs_folder and not options.job_log_dir and not options.fdl_help:
    raise UserError(f"--mode={options.mode} needs --job_log_dir=DIR, the folder of the run.")


def _check_devices(options: Options):
  if options.slices is not None and options.topology is None:
    raise UserError(f"--slices={options.slices} goes with --topology=NAME.")
  if len(options.topologies) > 1 and (options.mode != "plan" or options.slices is not None):
    raise UserError(
      f"--topology={options.topology}: only --mode=plan takes several, without --slices."
    )
  if options.topology is not None and options.num_cpu_devices is not None:
    raise UserError(
      f"--topology={options.topology} and --num_cpu_devices={options.num_cpu_devices} name"
      " different devices: leave one out."
    )


def _check_transfer(options: Options):
  if options.fdl_config is None:
    raise UserError(
      "--mode=transfer sets knobs, and a graph file has none: give --fdl_config=NAME."
    )
  if options.rates is not None and options.widths is None:
    raise UserError("--rates needs --widths, such as --widths=32,64,128: each is trained at each.")
  if options.rates is not None and 0 in options.rates:
    raise UserError("--rates: a rate of 0 trains nothing.")
  if options.rates is None and options.depths is not None:
    raise UserError("--depths goes with --rates: the coordinate check is over widths.")


def _check_plan(options: Options):
  if options.fdl_config is None:
    raise UserError("--mode=plan sets knobs, and a graph file has none: give --fdl_config=NAME.")
  if options.target == "cost" and options.price is None:
    raise UserError("--target=cost needs the --price of a device-hour, such as 2.50.")
  if options.target == "cost" and len(options.topologies) < 2:
    raise UserError(
      "--target=cost compares topologies, as --topology=h100-64,v5e-256 names them: on one, the"
      " fastest plan costs least."
    )
  if len(set(options.topologies)) < len(options.topologies):
    raise UserError(f"--topology={options.topology} names one twice.")
