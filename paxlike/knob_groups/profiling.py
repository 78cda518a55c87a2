# SPDX-License-Identifier: Apache-2.0
"""The knobs of profiling, and the method that returns it."""

from typing import Literal

import fiddle as fdl

from paxlike.config import ranges
from paxlike.config.knobs import Knobs
from paxlike.training.profiler import Profiling


class ProfilingKnobs(Knobs):
  """Profiling: which steps are profiled, and by what."""

  #: First and last step to profile, as log lines count, such as [5,8]. None: no profile.
  PROFILE_STEPS: tuple[ranges.NonNegative, ranges.NonNegative] | None = None
  #: xprof: JAX's profiler, into profile/ of the run's folder. nsys: a range for Nsight Systems.
  PROFILER: Literal["xprof", "nsys"] = "xprof"
  #: Profile all processes of the job, instead of only process 0.
  PROFILE_EVERY_PROCESS: bool = False
  PROFILER_PORT: ranges.Port | None = None  #: Port at which xprof can take traces. None: no port.

  def profile(self) -> fdl.Config[Profiling] | None:
    """Returns which steps to profile, and how; None without PROFILE_STEPS and PROFILER_PORT."""
    steps, port = self.PROFILE_STEPS, self.PROFILER_PORT
    if steps is None and port is None:
      return None
    graph = fdl.Config(Profiling, port=port, every_process=self.PROFILE_EVERY_PROCESS)
    if steps is not None:
      graph.steps, graph.profiler = steps, self.PROFILER
    return graph
