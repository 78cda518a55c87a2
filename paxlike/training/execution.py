# SPDX-License-Identifier: Apache-2.0
"""How the programs of a run are compiled for its devices."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
  """What a trainer needs besides its graph to run on devices.

  It is not `configurable`, so no config file can set it: XLA's options may write files, and a
  compiled step is code.

  Attributes:
    compiler_options: XLA's options for the step, evaluation and decoding.
    compiled_step: A step compiled ahead of time; None: no such step.
  """

  compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  compiled_step: jax.stages.Compiled | None = None
