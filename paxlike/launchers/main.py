# SPDX-License-Identifier: Apache-2.0
"""The command `paxlike-launch`, which prints or submits the script of a job."""

import contextlib
import dataclasses
import io
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from paxlike import file_io
from paxlike.cli import command_line
from paxlike.cli.flags import Options
from paxlike.errors import UserError, did_you_mean
from paxlike.launchers import command_comment
from paxlike.launchers.google_cloud import QueuedResources, Xpk
from paxlike.launchers.job import Job, has_open_variable, has_variable, with_defaults
from paxlike.launchers.kubernetes import Kubernetes
from paxlike.launchers.skypilot import SkyPilot
from paxlike.launchers.slurm import Slurm
from paxlike.launchers.ssh import Ssh
from paxlike.launchers.target import Target
from paxlike.telemetry import console

#: What `paxlike-launch` names -> the launcher.
TARGETS: dict[str, type[Target]] = {
  "slurm": Slurm,
  "k8s": Kubernetes,
  "xpk": Xpk,
  "gce": QueuedResources,
  "ssh": Ssh,
  "sky": SkyPilot,
}

# Flags whose values decide what can be checked.
_CHOICES = ("--fdl_config=", "--exp=", "--mode=", "--fdl_set=")
_HELP = """\
Prints the script or manifest that runs a job on a cluster; --to=FILE saves it, --submit submits it.
All other flags are those of paxlike, and are checked first. Their values may contain ${NAME},
${NAME:-DEFAULT} and ${NAME:?MESSAGE}, which the shell of the job expands.
"""


def main() -> int:
  """Entry point of the `paxlike-launch` command. Returns the exit status."""
  console.outlive_readers()
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status: 0, 2 for a user error, or the submission's."""
  return console.exit_status("paxlike-launch", lambda: _launch(argv))


def _launch(argv: Sequence[str]) -> int:
  options, flags = _parser().parse_known_args(argv)
  target = TARGETS[options.target](**_fields(TARGETS[options.target], options))
  own = _fields(Job, options)
  with _own_name():
    given = _parsed(flags, own=[f"--{name}" for name in vars(options)])
    experiment = _check(given, flags, target, nodes=own["nodes"])
  own["name"] = own["name"] or experiment
  job = Job(flags=tuple(flags), saves=given.enable_checkpoint_saving, **own)
  text = command_comment.added(target.text(job), argv)
  if options.to is None and not options.submit:
    print(text, end="")
    return 0
  with tempfile.TemporaryDirectory() as scratch:
    file = options.to or f"{scratch}/{job.title}{target.suffix}"
    try:
      file_io.write(file_io.absolute(file), text.encode())
    except file_io.failures() as error:
      raise UserError(f"--to={file} cannot be written: {file_io.reason(error)}.") from error
    return _submit(target.submission(file)) if options.submit else 0


def _submit(command: Sequence[str]) -> int:
  if shutil.which(command[0]) is None:
    raise UserError(f"--submit: this machine has no {command[0]}; save the file with --to=FILE.")
  return subprocess.run(command, check=False).returncode


def submission(argv: Sequence[str], file: str) -> list[str]:
  """Returns the command that submits a saved script; `argv` names its target and the flags of it.

  Raises:
    UserError: A flag of the target is wrong.
  """
  options, _ = _parser().parse_known_args(argv)
  return TARGETS[options.target](**_fields(TARGETS[options.target], options)).submission(file)


def _parser() -> console.Parser:
  parser = console.Parser(prog="paxlike-launch", description=_HELP, allow_abbrev=False)
  targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
  for name, target in TARGETS.items():
    summary = (target.__doc__ or "").strip().split("\n")[0]
    one = targets.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    one.add_argument("--to", type=console.path, metavar="FILE", help="save it as this file")
    one.add_argument("--submit", action="store_true", help="submit it")
    for field in (*dataclasses.fields(Job), *dataclasses.fields(target)):
      _add(one, field)
  return parser


def _add(parser: Any, field: dataclasses.Field):
  if "help" not in field.metadata:
    return
  how: dict[str, Any] = {"help": field.metadata["help"], "default": field.default}
  if field.default == ():
    how |= {"action": "append", "default": [], "metavar": field.name.upper()}
  elif isinstance(field.default, bool):
    how["action"] = "store_true"
  else:
    # The number whose default depends on other flags has none.
    kind = int if field.default is None else type(field.default)
    how |= {"type": kind, "metavar": field.name.upper()}
    how["help"] += f" (default: {field.default})" if field.default else ""
  parser.add_argument(f"--{field.name}", **{**how, "help": how["help"].replace("%", "%%")})


def _fields(cls: type, options: Any) -> dict[str, Any]:
  """Returns the values of a dataclass's flags.

  Raises:
    UserError: A number is out of range.
  """
  found = {}
  for field in (field for field in dataclasses.fields(cls) if "help" in field.metadata):
    value = getattr(options, field.name)
    least, most = field.metadata["range"]
    if type(value) is int and not least <= value <= most:
      bounds = f"at least {least}" if most == 2**31 else f"{least} to {most}"
      raise UserError(f"--{field.name}={value}: expected {bounds}.")
    found[field.name] = tuple(value) if isinstance(value, list) else value
  return found


@contextlib.contextmanager
def _own_name() -> Iterator[None]:
  """Context in which lines on stderr that begin with the name of `paxlike` have ours."""
  said = io.StringIO()
  try:
    with contextlib.redirect_stderr(said):
      yield
  finally:
    print(re.sub("(?m)^paxlike:", "paxlike-launch:", said.getvalue()), end="", file=sys.stderr)


def _open_knobs(flags: Sequence[str]) -> list[str]:
  return [flag for flag in flags if flag.startswith("--fdl.") and has_open_variable(flag)]


def _parsed(flags: Sequence[str], *, own: Sequence[str]) -> Options:
  """Returns the options of paxlike, with the defaults of variables, without `_open_knobs`.

  Args:
    flags: What is left of the command line, for paxlike.
    own: The flags of `paxlike-launch`, for hints.

  Raises:
    UserError: There is no such flag, or a value is wrong.
  """
  open_knobs = _open_knobs(flags)
  for flag in flags:
    is_value = not flag.startswith("--")
    if has_open_variable(flag) and (is_value or flag.startswith(_CHOICES)):
      raise UserError(
        f"{flag}: this cannot be checked: give the variable a default, ${{X:-VALUE}}."
      )
  given = [with_defaults(flag) for flag in flags if flag not in open_knobs]
  try:
    options = command_line.parse(["paxlike", *given])
  except UserError as error:
    raise _with_own_hint(error, own) from None
  if options.list or options.help or options.fdl_help or options.mode in ("show", "plan"):
    raise UserError("--list, --fdl_help, --mode=show and plan print: give them to paxlike itself.")
  return options


def _check(options: Options, flags: Sequence[str], target: Target, *, nodes: int) -> str:
  """Checks the experiment of a job, and returns its name.

  Of a knob whose value is a variable without a default, only the name is checked.

  Args:
    options: The options of paxlike, as `flags` give them.
    flags: The flags.
    target: Where the job runs.
    nodes: The number of its nodes.

  Raises:
    UserError: There is no such experiment or knob, a value is wrong, or the mesh does not fit.
  """
  from paxlike import root_graph
  from paxlike.config import building

  open_knobs = _open_knobs(flags)
  if options.fdl_config is None:
    return pathlib.Path(options.fdl_config_file or options.job_log_dir or "paxlike").stem
  experiment = root_graph.experiment_of(options)
  known, label = experiment.knobs(), type(experiment).__name__
  for flag in open_knobs:
    name = flag.removeprefix("--fdl.").partition("=")[0]
    if name not in known:
      raise UserError(f"no knob {name} in {label}.{did_you_mean(name, known)}")
  if not open_knobs:
    graph = root_graph.of(options, experiment)
    # A variable may follow the options of `sbatch`.
    if not any(has_variable(flag) for flag in flags if "MESH_SHAPE" in flag):
      _check_mesh(building.build(graph.mesh, source="mesh"), target, nodes)
  return label


def _check_mesh(mesh: Any, target: Target, nodes: int):
  """Raises UserError if a mesh does not have the devices of a job, or is divided differently."""
  devices = target.devices()
  if devices is None:
    return
  job = f"--nodes={nodes} {devices.flag}"
  try:
    _, dcn = mesh.sizes(devices.count * nodes, slices=nodes if devices.are_slice else 1)
  except UserError as error:
    raise UserError(f"{job}: {error}") from None
  outer = math.prod(dcn.values())
  if outer not in {1, nodes, nodes * devices.processes}:
    raise UserError(f"{job}: DCN_MESH_SHAPE has {outer} parts, and the job {nodes} nodes.")


def _with_own_hint(error: UserError, own: Sequence[str]) -> UserError:
  """Returns an error about an unknown flag, with a hint that knows `paxlike-launch`'s flags too."""
  unknown = re.match(r"unknown flag (--[\w-]+)\.", str(error))
  if unknown is None:
    return error
  if unknown[1] in own:
    return UserError(f"{unknown[1]} comes after the target: paxlike-launch TARGET {unknown[1]}=...")
  hint = did_you_mean(unknown[1], own)
  return UserError(f"{unknown[0]}{hint}") if hint else error


if __name__ == "__main__":
  sys.exit(main())
