# SPDX-License-Identifier: Apache-2.0
"""How the programs of a run are compiled for its devices."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax

from paxlike.devices.pgle import Profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
  """What a trainer needs besides its graph to run on devices.

  It is not `configurable`, so no config file can set it: XLA's options may write files, and a
  compiled step is code.

  Attributes:
    compiler_options: XLA's options for the step, evaluation and decoding.
    pgle_profile: Measured durations of the step's instructions, by which XLA schedules them; None:
      XLA's own estimates.
    compiled_step: A step compiled ahead of time; None: no such step.
  """

  compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  pgle_profile: Profile | None = None
  compiled_step: jax.stages.Compiled | None = None

  def compile_step(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a step.

    Raises:
      UserError: The profile is of another program.
    """
    options = dict(self.compiler_options)
    if self.pgle_profile is None:
      return lowered.compile(compiler_options=options)
    program = lowered.compile(compiler_options=options | self.pgle_profile.options())
    names = re.findall(r"^\s+(?:ROOT )?%([\w.\-]+) = ", program.as_text() or "", re.MULTILINE)
    self.pgle_profile.check(names)
    return program
