# SPDX-License-Identifier: Apache-2.0
"""`--mode=transfer`: trains an experiment at several sizes, and prints whether they agree."""

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from etils import epath

from paxlike import fiddlers, root_graph
from paxlike.cli import epochs, figures, flags, plot, transfer_page, transfer_plot
from paxlike.errors import UserError
from paxlike.run_mode import build_trainer
from paxlike.transfer import coordinate_check, rate_table, shapes
from paxlike.transfer.program import Program, RateScale
from paxlike.transfer.shapes import Shape, Training

if TYPE_CHECKING:
  from paxlike.experiment import Experiment

T = TypeVar("T")
_WIDTHS = (128, 256, 512, 1024, 2048)
# What the coordinate check sets, unless the command line does.
_CHECK = {"MAX_STEPS": 10, "LR_SCHEDULE": "constant"}


def run(options: flags.Options, experiment: "Experiment") -> int:
  """Prints the coordinate check or, with --rates, the table of learning rates; --save draws it.

  Raises:
    UserError: A knob contradicts the mode, a width does not fit the heads, or there is no data.
  """
  if options.save is not None:
    figures.empty()  # Raises if matplotlib is missing, before anything is measured.
    if not epath.Path(options.save).absolute().parent.is_dir():
      raise UserError(f"--save={options.save}: there is no such folder.")
  models = _Models(options, experiment)
  measure = _coordinate_check if options.rates is None else _rate_table
  text, facts, draw = measure(models)
  if jax.process_index() == 0:
    print(json.dumps(facts) if options.json else text, flush=True)
    if options.save is not None:
      plot.save(draw(), options.save)
  return 0


# The text that is printed, the same as plain data, and a function that draws it.
_Result = tuple[str, dict[str, Any], Callable[[], Any]]


def _coordinate_check(models: "_Models") -> _Result:
  widest = models.widths[-1]

  def measure(program: Program, shape: Shape) -> tuple[Any, Any]:
    draws = models.draws or coordinate_check.draws(shape.width, widest)
    return coordinate_check.measured(program, draws)

  found = models.each(("standard", "mup"), measure)
  sizes = {kind: coordinate_check.joined(models.widths, each) for kind, each in found.items()}
  check = coordinate_check.Check(models.training(), models.values["LEARNING_RATE"], sizes)
  draw = functools.partial(transfer_plot.of_check, check)
  return transfer_page.of_check(check), transfer_page.facts_of_check(check), draw


def _rate_table(models: "_Models") -> _Result:
  rates, draws = models.rates, models.draws or 1

  def measure(program: Program, _: Shape) -> np.ndarray:
    return rate_table.measured(program, rates, draws)

  found = models.each(shapes.KINDS, measure)
  losses = {kind: dict(zip(models.shapes, each, strict=True)) for kind, each in found.items()}
  tables = {kind: rate_table.Table(rates, each) for kind, each in losses.items()}
  table = rate_table.Tables(models.training(), draws, tables)
  draw = functools.partial(transfer_plot.of_rates, table)
  return transfer_page.of_rates(table), transfer_page.facts_of_rates(table), draw


class _Models:
  """The models of an experiment at the sizes and parametrizations of the command line.

  Attributes:
    values: The knobs of the experiment.
    widths, depths: The sizes, ascending.
    rates: The learning rates to try, ascending; empty: the experiment's.
    draws: Number of initial weights to average over; None: the default of what is measured.
    shapes: Each width at each depth.
  """

  def __init__(self, options: flags.Options, experiment: "Experiment"):
    """Checks that the models exist.

    Raises:
      UserError: One does not, or the command line sets a knob that the mode chooses.
    """
    given = {name for name, _ in options.knobs}
    chosen = {"NUM_LAYERS": options.depths, "LEARNING_RATE": options.rates}
    for name, flag in chosen.items():
      if flag is not None and name in given:
        raise UserError(f"--mode=transfer chooses {name} here: leave --fdl.{name} out.")
    knobs = tuple(pair for pair in options.knobs if pair[0] not in shapes.PARAMETRIZATION)
    self._options = dataclasses.replace(options, knobs=knobs)
    self._chosen: dict[str, Any] = {}
    if options.rates is None:
      kept = {*given, "MAX_STEPS"} if "NUM_EPOCHS" in given else given
      self._chosen = {name: value for name, value in _CHECK.items() if name not in kept}
    else:
      self._chosen = {"LEARNING_RATE": options.rates[0]}
    if "MAX_STEPS" in self._chosen:
      self._chosen["NUM_EPOCHS"] = None
    elif experiment.values()["NUM_EPOCHS"].value is not None:
      whole = self._experiment({})
      epochs.resolve(whole, lambda: build_trainer(root_graph.of(self._options, whole)))
      steps = whole.values()["MAX_STEPS"].value
      self._chosen |= {"MAX_STEPS": steps, "NUM_EPOCHS": None}
    root_graph.of(self._options, self._experiment({}))  # Raises if a knob has no effect.
    self.values = {name: setting.value for name, setting in experiment.values().items()}
    self._kind = self.values["PARAMETRIZATION"] if "PARAMETRIZATION" in given else None
    self.widths = options.widths or _WIDTHS
    self.rates = options.rates or ()
    self.draws = options.draws
    self.depths = options.depths or (self.values["NUM_LAYERS"],)
    self.shapes = [Shape(*pair) for pair in itertools.product(self.widths, self.depths)]
    for width in self.widths:
      shapes.grown(self.values, width)

  def each(
    self, kinds: tuple[str, ...], measure: Callable[[Program, Shape], T]
  ) -> dict[str, list[T]]:
    """Returns what is measured of each shape, by parametrization.

    Args:
      kinds: The parametrizations, unless the command line names one: it is then compared with the
        standard one.
      measure: Takes the program of a shape, and the shape.
    """
    if self._kind is not None:
      kinds = tuple(dict.fromkeys(("standard", self._kind)))
    self._program(kinds[-1], self.shapes[-1])  # Checks the largest before the first is trained.
    found: dict[str, list[T]] = {kind: [] for kind in kinds}
    for kind, shape in itertools.product(kinds, self.shapes):
      began = time.monotonic()
      found[kind].append(measure(self._program(kind, shape), shape))
      if jax.process_index() == 0:
        size = f"MODEL_DIMS={shape.width} NUM_LAYERS={shape.depth}"
        seconds = time.monotonic() - began
        print(f"paxlike: {kind}, {size}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return found

  def training(self) -> Training:
    """Returns what all models have in common."""
    trainer = build_trainer(root_graph.of(self._options, self._experiment({})))
    tokens = trainer.batch_size * trainer.data.seq_len
    return Training(self._options.fdl_config or "", trainer.num_steps, tokens)

  def _program(self, kind: str, shape: Shape) -> Program:
    base = Shape(min(self.widths), min(self.depths))
    sizes = shapes.grown(self.values, shape.width) | {"NUM_LAYERS": shape.depth}
    experiment = self._experiment(sizes | shapes.based(kind, base, self.values))
    graph, scale = root_graph.of(self._options, experiment), RateScale()
    fiddlers.change_rate(graph, scale)
    return Program(build_trainer(graph), scale)

  def _experiment(self, knobs: dict[str, Any]) -> "Experiment":
    experiment = root_graph.experiment_of(self._options)
    for name, value in (self._chosen | knobs).items():
      experiment.set(name, value, source="transfer")
    return experiment
