# SPDX-License-Identifier: Apache-2.0
"""The experiment and the root graph of a run, as flags name them."""

import time
from typing import TYPE_CHECKING, Any

from paxlike.cli import error_diagnosis, flags
from paxlike.config import knob_text
from paxlike.errors import UserError

if TYPE_CHECKING:
  from paxlike.experiment import Experiment

_SEARCH_SECONDS = 5  # Time limit of `_enabling`.


def experiment_if_named(options: flags.Options) -> "Experiment | None":
  """Returns the experiment that options name; None if they name a graph file or a run."""
  # Knobs without an experiment apply to the experiment of the run's folder.
  about_knobs = options.knobs or options.fdl_help
  is_named = options.fdl_config or (about_knobs and not options.fdl_config_file)
  return experiment_of(options) if is_named else None


def experiment_of(options: flags.Options) -> "Experiment":
  """Returns the experiment that options name, with its knobs set.

  Raises:
    UserError: There is no such experiment or knob, or a value is wrong.
  """
  from paxlike import registry, run_folder, saved_experiment

  if options.fdl_config is None:
    assert options.job_log_dir is not None
    folder, modules = run_folder.existing(options.job_log_dir), options.fdl_allow_modules
    return saved_experiment.read(folder, options.knobs, allow_modules=modules)
  experiment = registry.find(options.fdl_config)()
  for name, text in options.knobs:
    experiment.set(name, text, source="command line")
  return experiment


def of(options: flags.Options, experiment: "Experiment | None") -> Any:
  """Returns the root graph of an experiment or a file, with the edits of the options.

  Raises:
    UserError: The experiment never reads a knob that was set, or an edit is wrong.
  """
  from paxlike import fiddlers, run_folder, saved_experiment
  from paxlike.cli import hints
  from paxlike.config import graph_file
  from paxlike.telemetry import callbacks

  if experiment is None:
    path = options.fdl_config_file
    if path is None:
      assert options.job_log_dir is not None
      path = run_folder.existing(options.job_log_dir) / "config.json"
    with run_folder.reading(path):
      graph = graph_file.read(path, allow_modules=options.fdl_allow_modules)
  else:
    graph = of_experiment(experiment)
    callbacks.of_experiment(experiment)  # They may read knobs, too.
    given = experiment.settings()
    for name in experiment.unread():
      if given[name].source != saved_experiment.FILE:
        which = _enabling(experiment, name)
        raise UserError(f"{name} has no effect with the other knobs as they are{which}.")
  if options.mode == "decode":
    fiddlers.decoding(graph)
  if options.mode == "eval":
    fiddlers.next_token_only(graph)
  for text in options.fiddlers:
    graph = graph_file.call_fiddler(graph, text, fiddlers.FIDDLERS)
  for path, text in options.edits:
    with hints.of_edit(experiment, path, text):
      graph_file.set_path(graph, path, text)
  return graph


def of_experiment(experiment: "Experiment") -> Any:
  """Returns the root graph of an experiment.

  Raises:
    UserError: `trainer()` does not return a graph of `Trainer`.
  """
  from paxlike.config import building
  from paxlike.training.trainer import Trainer

  graph = experiment.trainer()
  source = f"what {type(experiment).__name__}.trainer() returns"
  building.check_kind(graph, Trainer, source=source)
  return graph


def _enabling(experiment: "Experiment", name: str) -> str:
  """Returns the end of a message: a value of another knob that gives `name` an effect, or ""."""
  began = time.monotonic()
  values = experiment.values()
  knobs = type(experiment).knobs()
  # Those that are declared beside it first.
  near = sorted(knobs.items(), key=lambda item: item[1].declared_in is not knobs[name].declared_in)
  for other, knob in near:
    is_read = other in experiment.read_names()
    for choice in knob.trials(values[other].value) if is_read else ():
      if time.monotonic() - began > _SEARCH_SECONDS:
        return ""
      one = type(experiment)()
      settings = {n: setting.value for n, setting in experiment.settings().items()}
      for given, value in {**settings, other: choice}.items():
        one.set(given, value, source="trial")
      error_diagnosis.failure(one.trainer)  # Even if it fails, it may have read the knob.
      if name in one.read_names():
        return f": {other}={knob_text.spell(choice)} would give it one"
  return ""
