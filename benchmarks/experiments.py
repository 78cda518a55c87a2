# SPDX-License-Identifier: Apache-2.0
"""Experiments as the program builds them, for benchmarks that run their steps themselves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paxlike import root_graph, run_mode
from paxlike.cli import command_line, startup
from paxlike.errors import UserError

if TYPE_CHECKING:
  from paxlike.experiment import Experiment
  from paxlike.training.trainer import Trainer


def build(name: str, arguments: Sequence[str]) -> tuple["Experiment", "Trainer"]:
  """Returns an experiment and the trainer that `paxlike` would build from these flags.

  Raises:
    UserError: The flags are wrong, or the run could not begin.
  """
  # The mode asks for no folder.
  options = command_line.parse(["benchmark", f"--fdl_config={name}", "--mode=compile", *arguments])
  if options.topology is not None:
    raise UserError("benchmarks run steps: leave --topology out.")
  startup.set_up_jax(options)
  experiment = root_graph.experiment_of(options)
  trainer = run_mode.build_trainer(root_graph.of(options, experiment))
  trainer.check()
  return experiment, trainer
