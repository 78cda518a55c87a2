# SPDX-License-Identifier: Apache-2.0
"""What a launcher runs: the `paxlike` command and its surroundings, whatever the cluster."""

import dataclasses
import hashlib
import re
import shlex
from typing import Any

from paxlike.errors import UserError

#: Exit statuses after which a restart resumes the run: a process is lost, stuck or was stopped.
RESTART = (75, 134, 137, 142, 143)
#: Exit status of ssh if the machine is out of reach or the connection is lost.
LOST = 255
# ${NAME}, ${NAME:-DEFAULT} or ${NAME:?MESSAGE}, which the shell of the job expands.
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::([-?])([^{}]*))?\}", re.ASCII)


def option(default: Any, text: str, *, least: int = 0, most: int = 2**31) -> Any:
  """Returns a dataclass field that is a flag of `paxlike-launch`, with its help text.

  `least` and `most` are the bounds of a number.
  """
  return dataclasses.field(default=default, metadata={"help": text, "range": (least, most)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A job, as all launchers take it.

  Attributes:
    flags: The flags of `paxlike`, which may contain `${NAME}`, `${NAME:-DEFAULT}` and
      `${NAME:?MESSAGE}`, an error if there is no such variable.
    saves: Whether it writes checkpoints, without which a restart begins with step 0.
  """

  flags: tuple[str, ...]
  saves: bool = True
  name: str = option("", "name of the job; default: the experiment's")
  nodes: int = option(1, "number of machines; for TPUs, of slices", least=1)
  program: str = option("paxlike", "command that the flags are given to")
  setup: str = option("", "shell commands before it, such as 'source .venv/bin/activate'")
  env: tuple[str, ...] = option((), "NAME=VALUE for each process; may be given several times")
  max_restarts: int | None = option(
    None,
    "restarts after a lost, stuck or preempted process"
    " (default: 100; with --enable_checkpoint_saving=false: 0)",
  )

  def __post_init__(self):
    for pair in self.env:
      if not re.match(r"[A-Za-z_]\w*=", pair):
        raise UserError(f"--env={pair}: expected NAME=VALUE.")

  @property
  def title(self) -> str:
    """The job's name, in lower-case letters, digits and dashes, as Kubernetes requires.

    A digest tells apart names that are too long or differ in other characters, as in a sweep.
    """
    name = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
    if len(name) > 40 or re.search(r"[^\w.-]", self.name, re.ASCII):
      digest = hashlib.sha256(self.name.encode()).hexdigest()[:6]
      name = f"{name[:33].strip('-')}-{digest}"
    return name if name[:1].isalpha() else f"job-{name}".rstrip("-")

  @property
  def restarts(self) -> int:
    """The restarts after a lost, stuck or preempted process."""
    if self.max_restarts is None:
      return 100 if self.saves else 0
    return self.max_restarts

  @property
  def log_dir(self) -> str:
    """The value of the flag --job_log_dir; "" without one."""
    words = [*self.flags, ""]
    for index in reversed(range(len(self.flags))):
      name, assigned, value = words[index].lstrip("-").partition("=")
      if name == "job_log_dir":
        return value if assigned else words[index + 1]
    return ""

  def check_log_dir(self, container: str):
    """Raises UserError if --job_log_dir is relative, as what a container has is lost with it.

    Args:
      container: The flag that names the image.
    """
    folder = with_defaults(self.log_dir)
    is_open = has_open_variable(self.log_dir) and self.log_dir.startswith("${")
    if folder and not is_open and not folder.startswith("/") and "://" not in folder:
      raise UserError(
        f"--job_log_dir={self.log_dir} is relative, and lost with the container of {container}:"
        " give a path that begins with / or gs://."
      )

  def command(self, *extra: str, separator: str = " \\\n  ") -> str:
    """Returns the command line of a process, with flags that the launcher adds."""
    return separator.join([self.program, *(quoted(flag) for flag in (*self.flags, *extra))])

  def preparation(self) -> list[str]:
    """Returns the shell lines before the command: exports of `env`, then `setup`."""
    pairs = (pair.split("=", 1) for pair in self.env)
    exports = [f"export {name}={quoted(value)}" for name, value in pairs]
    return [*exports, *self.setup.splitlines()]

  def exported(self) -> list[str]:
    """Returns the names of the variables that `preparation` exports."""
    names = [pair.partition("=")[0] for pair in self.env]
    return list(dict.fromkeys([*names, *re.findall(r"\bexport +(\w+)=", self.setup)]))


def quoted(text: str) -> str:
  """Quotes a word for a shell, which still expands variables as in `Job.flags` in it."""
  if not _VARIABLE.search(text):
    return shlex.quote(text)
  parts, end = [], 0
  for match in _VARIABLE.finditer(text):
    rest = "" if match[2] is None else f":{match[2]}{_escaped(match[3])}"
    parts += [_escaped(text[end : match.start()]), f"${{{match[1]}{rest}}}"]
    end = match.end()
  return f'"{"".join(parts)}{_escaped(text[end:])}"'


def _escaped(text: str) -> str:
  return re.sub(r'([\\"$`])', r"\\\1", text)


def with_defaults(text: str) -> str:
  """Returns text with each variable replaced by its default, or by its name if it has none."""
  return _VARIABLE.sub(lambda match: match[3] if match[2] == "-" else match[1], text)


def has_open_variable(text: str) -> bool:
  """Returns whether text has a variable without a default."""
  return any(match[2] != "-" for match in _VARIABLE.finditer(text))


def has_variable(text: str) -> bool:
  """Returns whether text has a variable, with a default or without."""
  return bool(_VARIABLE.search(text))


def variable(text: str) -> str:
  """Returns the name of the variable without a default that a text consists of, or ""."""
  match = _VARIABLE.fullmatch(text)
  return match[1] if match and match[2] is None else ""
