# SPDX-License-Identifier: Apache-2.0
"""Shell commands by which a process notes its number on its machine, and by which others signal it.

The number is noted with the time at which the process started, so that no other process gets the
signal if the number was given again.
"""

import hashlib

from paxlike.launchers.job import Job


def path(job: Job, suffix: str = "") -> str:
  """Returns the path of the file, for a shell: of this user, job and folder."""
  digest = hashlib.sha256(job.log_dir.encode()).hexdigest()[:8]
  return f"/tmp/paxlike-$(id -u)-{job.title}-{digest}{suffix}.pid"


def note(file: str) -> str:
  """Returns the command by which a shell notes its number; it ends if the file is not writable."""
  return f"echo $$ $({_start('$$')}) > {file} || exit 1"


def signal(file: str) -> str:
  """Returns commands that send a process the signal `name`.

  For `wait` seconds (both are variables of the shell), it may still be about to start.
  """
  is_same = f'[ "$({_start("$pid")})" = "$start" ]'
  return f"""\
for ((; wait >= 0; wait--)); do
  read -r pid start < {file} && {is_same} &&
    kill -${{name}} $pid && break
  ((wait == 0)) || sleep 1
done"""


def _start(number: str) -> str:
  # The command in parentheses may hold blanks.
  return f"sed 's/.*) //' /proc/{number}/stat | cut -d' ' -f20"
