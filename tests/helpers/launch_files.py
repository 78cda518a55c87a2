# SPDX-License-Identifier: Apache-2.0
"""The scripts and manifests in scripts/launch. `python -m helpers.launch_files` makes them anew."""

import contextlib
import io
import os
import pathlib
import shutil
import subprocess
import sys

from helpers.sources import REPOSITORY
from paxlike.launchers import command_comment, main

FILES = sorted((REPOSITORY / "scripts" / "launch").iterdir())
# Prints the number of words, the words, and then the environment, each with a NUL at its end.
_PRINT = "#!/usr/bin/env bash\nprintf '%s\\0' $# \"$@\"\nenv -0\n"


def linter(name: str) -> str:
  """Returns the path of a program that pip may have installed; "" if there is none."""
  return shutil.which(name, path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}") or ""


def made_anew(text: str) -> str:
  """Returns what the command in a file prints."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main.run(command_comment.read(text)) == 0
  return out.getvalue()


def started(
  file: pathlib.Path, *flags: str, folder: pathlib.Path, program: str, **variables: str
) -> tuple[list[str], dict[str, str]]:
  """Runs a script with a program that takes the place of `srun` or `sbatch`.

  Returns:
    (its words, its environment); ([message], {}) if the script ends before.
  """
  (folder / program).write_text(_PRINT)
  (folder / program).chmod(0o755)
  path = f"{folder}:{os.environ['PATH']}"
  done = subprocess.run(
    [shutil.which("bash") or "", file, *flags],
    env={"PATH": path, "HOME": os.environ["HOME"], **variables},
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    return [done.stderr], {}
  count, *rest = done.stdout.split("\0")[:-1]
  words, pairs = rest[: int(count)], rest[int(count) :]
  return words, dict(pair.split("=", 1) for pair in pairs)


if __name__ == "__main__":
  for path in FILES:
    path.write_text(made_anew(path.read_text()))
