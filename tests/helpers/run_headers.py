# SPDX-License-Identifier: Apache-2.0
"""The header of a run, for tests of what logs it."""

import jax

from paxlike.devices.mesh import MeshSpec
from paxlike.layers.flops import TrainingFlops
from paxlike.telemetry.run_header import RunHeader


def made() -> RunHeader:
  """The header of a run with 1,000 tokens a step, on two devices."""
  return RunHeader(
    num_trained=10,
    num_params=10,
    batch_size=4,
    seq_len=250,
    devices=MeshSpec(ici=(2, 1, 1)).build(jax.devices()[:2]),
    flops=TrainingFlops(full=5e9, causal=4e9),
    attention="xla",
  )
