# SPDX-License-Identifier: Apache-2.0
"""`--mode=plan`: finds plans for each topology, and prints them."""

import contextlib
import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paxlike import root_graph
from paxlike.cli import flags, plan_page
from paxlike.cli.plan_page import Run
from paxlike.devices import topology
from paxlike.errors import UserError
from paxlike.layers.remat import Remat
from paxlike.planning import measured_rates, planner
from paxlike.planning.planner import Plan, Plans
from paxlike.run_mode import build_trainer

if TYPE_CHECKING:
  from paxlike.experiment import Experiment


def run(options: flags.Options, experiment: "Experiment") -> int:
  """Prints how to shard the experiment over devices. Returns 3 if nothing fits.

  Raises:
    UserError: A knob contradicts the plan, a topology is wrong, or no mesh divides the batch.
  """
  for name, _ in options.knobs:
    if name in planner.CHOSEN:
      raise UserError(f"--mode=plan chooses {name}: leave --fdl.{name} out.")
  names = options.topologies or (None,)
  kinds = {topology.parse(name)[0] for name in options.topologies}
  if options.calibrate is not None and len(kinds) > 1:
    raise UserError(
      f"--calibrate={options.calibrate} is of one kind of device, --topology of several:"
      f" {', '.join(sorted(kinds))}."
    )
  prices = [_price(options.price, name) for name in names]
  runs = []
  for name, price in zip(names, prices, strict=True):
    # `main` has entered the context of a single topology.
    with contextlib.nullcontext() if len(names) == 1 else topology.target(name):
      try:
        plans = _find(options)
      except UserError as error:
        raise UserError(f"--topology={name}: {error}" if len(names) > 1 else str(error)) from error
    runs.append(Run(name, plans, _Command(options, experiment, name), options.tokens, price))
  if len(runs) == 1:
    (one,) = runs
    print(json.dumps(plan_page.facts(one)) if options.json else plan_page.text(one))
  else:
    by_cost = options.target == "cost"
    if options.json:
      print(json.dumps(plan_page.compared_facts(runs, by_cost=by_cost)))
    else:
      print(plan_page.compared(runs, by_cost=by_cost))
  return 0 if any(one.plans.first is not None for one in runs) else 3


def _find(options: flags.Options) -> Plans:
  """Returns the plans for the target devices."""

  def build(knobs: Mapping[str, Any]) -> Any:
    one = root_graph.experiment_of(options)
    for name, value in knobs.items():
      one.set(name, value, source="plan")
    return build_trainer(root_graph.of(options, one))

  topology.take_gpu_memory()  # The same for all plans.
  measured = None if options.calibrate is None else measured_rates.read(options.calibrate)
  is_given = any(name == "CHECKPOINT_POLICY" for name, _ in options.knobs)
  values = root_graph.experiment_of(options).values()
  remats = [Remat[values["CHECKPOINT_POLICY"].value]] if is_given else planner.REMATS
  plans = planner.find(
    build,
    topology.devices(),
    batch=options.global_batch,
    remats=remats,
    dcn_bandwidth=options.dcn_bandwidth,
    measured=measured,
  )
  return planner.confirmed(plans, build, options.confirm or 0)


def _price(prices: Mapping[str, float] | None, name: str | None) -> float | None:
  """Returns the price of a device-hour of a topology; None: none is given.

  Raises:
    UserError: There are prices of other kinds of devices only.
  """
  if prices is None:
    return None
  kind = "" if name is None else name.partition("-")[0]
  if kind not in prices and "" not in prices:
    given = ",".join(f"{kind}:{price:g}" for kind, price in prices.items())
    raise UserError(f"--price={given} has no price of {kind or 'these devices'}.")
  return prices.get(kind, prices.get(""))


class _Command:
  """The command line that compiles a plan for a topology."""

  def __init__(self, options: flags.Options, experiment: "Experiment", name: str | None):
    self._options, self._experiment, self._name = options, experiment, name

  def __call__(self, plan: Plan) -> str:
    options, experiment = self._options, self._experiment
    now = {name: setting.value for name, setting in experiment.values().items()}
    own = [f"--fdl.{name}={text}" for name, text in options.knobs if name not in plan.how.knobs]
    own += [f"--fiddler={text}" for text in options.fiddlers]
    own += [f"--fdl.{path}={text}" for path, text in options.edits]
    words = [f"--fdl_config={options.fdl_config}", *own, "--mode=compile"]
    words += [] if self._name is None else [f"--topology={self._name}"]
    words += [] if options.slices is None else [f"--slices={options.slices}"]
    # A knob of the plan that the command line has set is not in `own`, so it is always listed.
    chosen = plan_page.flags(plan, {n: v for n, v in now.items() if n not in experiment.settings()})
    return " ".join(["paxlike", *map(shlex.quote, words), *chosen])
