# SPDX-License-Identifier: Apache-2.0
"""Plans: what is printed of them is true."""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.program import run

from paxlike import root_graph, run_mode
from paxlike.cli import command_line, startup
from paxlike.devices import chips, topology
from paxlike.devices.mesh import AXES
from paxlike.planning import planner
from paxlike.training import preflight

# Four layers, wide enough for tensor 4.
SMALL = (
  "--fdl_config=Scaled16B",
  "--fdl.NUM_LAYERS=4",
  "--fdl.MODEL_DIMS=256",
  "--fdl.HIDDEN_DIMS=512",
  "--fdl.NUM_HEADS=4",
  "--fdl.VOCAB_SIZE=512",
  "--fdl.MAX_SEQ_LEN=256",
)
MIXTRAL = ("--fdl_config=Mixtral8x7B", "--fdl.NUM_LAYERS=4", "--fdl.NUM_KV_HEADS=4")
PLAN = (*SMALL, "--mode=plan")


def planned(capsys: Any, *more: str) -> dict[str, Any]:
  assert run(*more, "--json") == 0
  captured = capsys.readouterr()
  assert captured.err == ""
  return json.loads(captured.out)


@contextlib.contextmanager
def started(command: str) -> Iterator[Any]:
  """Context of the run that a printed command line starts."""
  words = shlex.split(command)
  assert words[0] == "paxlike"
  options = command_line.parse(words)
  startup.set_up_jax(options)
  with topology.target(options.topology, slices=options.slices or 1):
    yield run_mode.build_trainer(root_graph.of(options, root_graph.experiment_of(options)))


def test_the_page(capsys):
  assert run(*PLAN, "--topology=v5e-16", "--slices=2", "--global_batch=64") == 0
  out = capsys.readouterr().out
  assert re.search(r"devices +32 x TPU v5 lite, 16.91 GB each", out)
  assert re.search(r"global batch +64 sequences = 16,384 tokens", out)
  assert re.search(r"configurations +[\d,]+, of which [\d,]+ fit", out)
  assert re.search(
    r"mesh +microbatches +schedule +remat +GB +s +\+- +MFU +tokens/s +bound by\n", out
  )
  assert "fastest:\n  paxlike --fdl_config=Scaled16B --fdl.NUM_LAYERS=4" in out


@pytest.mark.parametrize(
  ("topology_flags", "batch", "model"),
  [
    (("--topology=v5e-16",), 32, SMALL),
    pytest.param(("--topology=h100-16",), 64, SMALL, marks=pytest.mark.slow),
    pytest.param(("--topology=gb200-8",), 16, SMALL, marks=pytest.mark.slow),
    pytest.param(("--topology=h100-8",), 16, (*MIXTRAL, *SMALL[2:]), marks=pytest.mark.slow),
  ],
)
def test_every_plan_is_one_that_the_experiment_takes(topology_flags, batch, model, capsys):
  facts = planned(capsys, *model, "--mode=plan", *topology_flags, f"--global_batch={batch}")
  chip = chips.find(facts["device_kind"])
  assert chip is not None and facts["bytes_of_device"] == chip.usable_memory
  assert facts["fitting"] and facts["plans"]
  seconds = [plan["seconds"]["total"] for plan in facts["plans"]]
  assert seconds == sorted(seconds)
  meshes = [json.dumps(plan["mesh"]) for plan in facts["plans"]]
  assert len(set(meshes)) == len(meshes)
  used = {axis for plan in facts["plans"] for axis in plan["mesh"]["ici"]}
  assert used >= {"pipeline", "data", "fsdp", "tensor"}
  assert ("expert" in used) == ("Mixtral8x7B" in model[0])
  for plan in facts["plans"]:
    assert plan["predicted_bytes"]["total"] < planner.MAX_SHARE * facts["bytes_of_device"]
    with started(plan["command"]) as made:
      preflight.check_setup(made, training=True)
      assert made.batch_size == batch
      sizes = [plan["mesh"]["ici"].get(a, 1) * plan["mesh"]["dcn"].get(a, 1) for a in AXES]
      assert list(made.devices.shape.values()) == sizes
      pipeline = made.model.stack.pipeline
      parts = made.accumulation_steps * (1 if pipeline is None else pipeline.microbatches)
      assert parts == plan["microbatches"]
      assert made.model.stack.remat.name == plan["knobs"]["CHECKPOINT_POLICY"]


@pytest.mark.slow
def test_the_best_plan_compiles_and_holds_what_was_predicted(capsys):
  wide = ("--fdl.MODEL_DIMS=1024", "--fdl.HIDDEN_DIMS=4096", "--fdl.VOCAB_SIZE=8192")
  facts = planned(capsys, *PLAN, *wide, "--topology=h100-8", "--global_batch=32", "--confirm=1")
  best, *others = facts["plans"]
  assert best["fits"] and all(plan["compiled_bytes"] is None for plan in others)
  predicted, compiled = best["predicted_bytes"], best["compiled_bytes"]
  arguments = predicted["weights"] + predicted["optimizer"] + predicted["batch"]
  assert compiled["arguments"] == pytest.approx(arguments, rel=0.02)
  assert compiled["peak"] == pytest.approx(predicted["total"], rel=0.2)


def test_what_the_user_sets_stays_set(capsys):
  facts = planned(
    capsys,
    *PLAN,
    "--topology=v5e-4",
    "--fdl.PERCORE_BATCH_SIZE=2",
    "--fdl.optimizer.b2=0.9",
    "--fdl.QUANTIZATION=int8",
  )
  assert facts["sequences_per_step"] == 8
  command = facts["plans"][0]["command"]
  assert "--fdl.optimizer.b2=0.9" in command and "--fdl.QUANTIZATION=int8" in command
  assert command.count("PERCORE_BATCH_SIZE=2") == 1


def test_what_fits_nowhere_is_a_verdict_with_the_nearest(capsys):
  big = ("--fdl_config=Scaled128B", "--mode=plan", "--topology=v5e-4", "--global_batch=4")
  assert run(*big) == 3
  out = capsys.readouterr().out
  assert re.search(r"configurations +\d+, of which 0 fit", out)
  assert "nothing fits; the configuration that needs the least" in out and "fastest:" not in out
  assert run(*big, "--json") == 3
  facts = json.loads(capsys.readouterr().out)
  assert facts["plans"] == [] and facts["nearest"]["predicted_bytes"]["total"] > 16e9


@pytest.mark.parametrize(
  ("more", "says"),
  [
    (("--mode=plan",), "has no data sheet of cpu: give a --topology"),
    (("--mode=plan", "--topology=v5e-5"), "there is no such slice"),
    (("--mode=plan", "--topology=v5e-16", "--global_batch=0"), "expected an int of at least 1"),
    (("--mode=plan", "--topology=v5e-64", "--global_batch=1"), "divides a batch of 1 sequences"),
    (("--mode=plan", "--topology=v5e-4", "--fdl.NUM_STAGES=2"), "--mode=plan chooses NUM_STAGES"),
    (("--mode=compile", "--confirm=1"), "--confirm goes with --mode=plan"),
    (("--mode=compile", "--global_batch=8"), "--global_batch goes with --mode=plan"),
  ],
)
def test_mistakes_are_said(more, says, capsys):
  assert run(*SMALL, *more) == 2
  err = capsys.readouterr().err
  assert says in err and err.count("\n") == 1


def test_a_file_has_no_knobs_to_set(capsys):
  assert run("--fdl_config_file=x.json", "--mode=plan", "--topology=v5e-4") == 2
  assert "give --fdl_config=NAME" in capsys.readouterr().err


def test_all_of_a_rack_are_joined_by_the_fast_network(capsys):
  facts = planned(capsys, *PLAN, "--topology=gb200-16", "--global_batch=64")
  assert all(set(plan["mesh"]["dcn"].values()) <= {1} for plan in facts["plans"])


def test_plans_within_the_errors_of_the_first_are_ties_and_a_run_has_days_and_a_price(capsys):
  flags = (*PLAN, "--topology=v5e-16", "--global_batch=64", "--tokens=1e12", "--price=2.5")
  found = planned(capsys, *flags)
  first, *others = found["plans"]
  assert first["tie"] and {one["tie"] for one in others} == {True, False}
  for one in others:
    low = one["seconds"]["total"] * (1 - one["expected_error"])
    high = first["seconds"]["total"] * (1 + first["expected_error"])
    assert one["tie"] == (low <= high)
  # Tensor parallelism is predicted less well.
  assert len({one["expected_error"] for one in found["plans"]}) > 1
  run_of = found["run"]
  assert run_of["days"] == pytest.approx(1e12 / first["tokens_per_second"] / 86400)
  assert run_of["cost"] == pytest.approx(2.5 * 16 * 24 * run_of["days"])
  second = others[0]["seconds"]
  more = {name: second[name] - first["seconds"][name] for name in second}
  cause = max(set(more) - {"total"}, key=lambda name: abs(more[name]))
  said = f"the next mesh takes {more['total']:+.3f} s: {cause} {more[cause]:+.3f} s"
  assert found["reason"].startswith(said)
  assert run(*flags) == 0
  out = capsys.readouterr().out
  assert found["reason"] in out and "device-hours, at 2.5 each" in out
  assert re.search(r"1e\+12 tokens: [\d.]+ days", out)


def test_a_price_without_tokens_is_refused(capsys):
  assert run(*PLAN, "--topology=v5e-16", "--price=2") == 2
  assert "--price=2.0 is of a whole run: give its --tokens too." in capsys.readouterr().err
