# SPDX-License-Identifier: Apache-2.0
"""Waiting for jobs that a launcher has started."""

import pathlib
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from paxlike.checkpoints.run_checkpoints import Checkpoints


def until(condition: Callable[[], Any], *, seconds: float, what: str):
  """Waits until a condition holds; fails with `what` after so many seconds."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, what
    time.sleep(0.5)


def newest(folder: pathlib.Path) -> int:
  """Returns the newest step that a run has saved; 0 if none."""
  if not (folder / "checkpoints").is_dir():
    return 0
  return Checkpoints(epath.Path(folder / "checkpoints"), keep=None).latest() or 0
