# SPDX-License-Identifier: Apache-2.0
"""The interface of the launchers."""

import abc
import dataclasses
from typing import ClassVar

from paxlike.launchers.job import Job


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices of each of a job's nodes.

  Attributes:
    count: Their number.
    flag: The flag that says so, with its value.
    processes: The number of processes that share them.
    are_slice: Whether a node is a slice of TPUs.
  """

  count: int
  flag: str
  processes: int = 1
  are_slice: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(abc.ABC):
  """Where a job runs, and how it gets there.

  Subclasses are dataclasses. Their fields made by `job.option` are flags of `paxlike-launch`.
  """

  #: Name of a saved script or manifest, after the job's name.
  suffix: ClassVar[str]

  @abc.abstractmethod
  def text(self, job: Job) -> str:
    """Returns the script or manifest.

    Raises:
      UserError: The target cannot run this job.
    """

  def devices(self) -> Devices | None:
    """Returns the devices of each node; None if the flags do not tell."""
    return None

  @abc.abstractmethod
  def submission(self, file: str) -> list[str]:
    """Returns the command that submits a saved script or manifest."""
