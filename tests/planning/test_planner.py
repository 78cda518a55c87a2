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
LONG = "--fdl.MAX_SEQ_LEN=16384"
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
    pytest.param(("--topology=h100-8",), 8, (*SMALL, LONG), marks=pytest.mark.slow),
    pytest.param(
      ("--topology=h100-16",),
      16,
      (*SMALL, "--fdl.MAX_SEQ_LEN=2048", "--fdl.ATTENTION_KERNEL=ring"),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      ("--topology=h100-8",),
      8,
      (*SMALL, LONG, "--fdl.ATTENTION_KERNEL=cudnn"),
      marks=pytest.mark.slow,
    ),
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
  kernel = model[-1].removeprefix("--fdl.ATTENTION_KERNEL=")
  assert ("context" in used) == (kernel == "ring" or (LONG in model and kernel != "cudnn"))
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
  wide += ("--fdl.MTP_NUM_LAYERS=2",)
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
  assert found["reason"] in out and "at 2.5 each" in out
  assert re.search(r"1e\+12 tokens: [\d.]+ days", out)


@pytest.mark.slow
def test_topologies_are_compared_by_time_or_cost(capsys):
  """GPUs take less time than as many TPUs; which of them cost less is up to the price."""
  plan = ("--fdl_config=Synthetic126M", "--mode=plan", "--global_batch=16")
  flags = (*plan, "--topology=v5e-4,h100-4", "--tokens=1e12")
  slow, fast = "v5e-4", "h100-4"
  by_time = planned(capsys, *flags)["topologies"]
  assert [one["topology"] for one in by_time] == [fast, slow]
  for price, order in (
    ("h100:9,v5e:0.1", [slow, fast]),
    ("2", [fast, slow]),
    ("v5e:100,2", [fast, slow]),
  ):
    found = planned(capsys, *flags, f"--price={price}", "--target=cost")["topologies"]
    assert [one["topology"] for one in found] == order
    costs = [one["cost_of_billion_tokens"] for one in found]
    assert costs == sorted(costs)
    for one in found:
      assert one["run"]["cost"] == pytest.approx(1e3 * one["cost_of_billion_tokens"])
  alone = {one: planned(capsys, *plan, f"--topology={one}") for one in order}
  for one in by_time:
    expected = alone[one["topology"]]["plans"]
    assert [plan["seconds"] for plan in one["plans"]] == [plan["seconds"] for plan in expected]
    assert one["plans"][0]["command"] == expected[0]["command"]
  assert run(*flags, "--price=h100:9,v5e:0.1", "--target=cost") == 0
  out = capsys.readouterr().out
  assert out.splitlines()[1].startswith("v5e-4 ") and "v5e-4 costs least" in out


@pytest.mark.slow
def test_a_topology_that_holds_nothing_is_last(capsys):
  flags = ("--fdl_config=Scaled128B", "--mode=plan", "--global_batch=64")
  found = planned(capsys, *flags, "--topology=v5e-4,h100-64")["topologies"]
  assert [one["topology"] for one in found] == ["h100-64", "v5e-4"] and not found[1]["plans"]
  assert run(*flags, "--topology=v5e-4,h100-64") == 0
  assert re.search(r"^v5e-4 +nothing fits", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    ("--topology=v5e-4,v5e-4", "--topology=v5e-4,v5e-4 names one twice."),
    ("--topology=v5e-4,v5e-16 --slices=2", "only --mode=plan takes several, without --slices."),
    ("--topology=v5e-4,h100-8 --price=h100:2", "--price=h100:2 has no price of v5e."),
    (
      "--topology=v5e-4 --price=v5e:1,v5e:2",
      "--price=v5e:1,v5e:2: it gives the price of v5e twice",
    ),
    ("--topology=v5e-4 --price=cheap", "--price=cheap: expected a float of at least 0"),
    ("--topology=v5e-4,h100-8 --target=cost", "--target=cost needs the --price of a device-hour"),
    ("--topology=v5e-4 --target=cost --price=1", "--target=cost compares topologies"),
    ("--topology=v5e-4 --target=money", "--target=money: expected time or cost, got 'money'."),
  ],
)
def test_what_cannot_be_compared_is_refused(capsys, flags, says):
  assert run(*PLAN, *flags.split()) == 2
  assert says in capsys.readouterr().err


def test_a_policy_that_is_given_is_that_of_all_plans(capsys):
  memory = {}
  for policy in ("SAVE_NOTHING", "OFFLOAD_QKV_PROJ", "SAVE_QKV_PROJ", "SAVE_DOT_WITH_NO_BATCH_DIM"):
    flags = (*PLAN, "--topology=h100-8", "--global_batch=64", f"--fdl.CHECKPOINT_POLICY={policy}")
    plans = planned(capsys, *flags)["plans"]
    assert {plan["knobs"]["CHECKPOINT_POLICY"] for plan in plans} == {policy}
    (alone,) = [plan for plan in plans if plan["mesh"]["ici"] == {"fsdp": 8}]
    memory[policy] = alone["predicted_bytes"]["activations"]
  none, offloaded, projections, all_matmuls = memory.values()
  assert none == offloaded < projections < all_matmuls
  assert run(*PLAN, "--topology=h100-8", "--fdl.CHECKPOINT_POLICY=SAVE_NOTHIN") == 2
  assert "Did you mean SAVE_NOTHING" in capsys.readouterr().err


@pytest.mark.slow
def test_a_slower_network_between_nodes_makes_plans_across_them_slower(capsys):
  flags = (*PLAN, "--topology=h100-16", "--global_batch=64")
  slow = planned(capsys, *flags, "--dcn_bandwidth=1e9")["plans"]
  usual = planned(capsys, *flags)["plans"]
  given = planned(capsys, *flags, "--dcn_bandwidth=50e9")["plans"]
  assert [plan["seconds"] for plan in given] == [plan["seconds"] for plan in usual]
  for one in slow:
    (other,) = [plan for plan in usual if plan["mesh"] == one["mesh"]]
    assert one["seconds"]["total"] > other["seconds"]["total"]


def test_a_policy_may_be_written_as_knobs_are(capsys):
  flags = (*PLAN, "--topology=v5e-4", "--global_batch=16")
  plain, other = (
    planned(capsys, *flags, f"--fdl.CHECKPOINT_POLICY={text}")
    for text in ("SAVE_NOTHING", '"SAVE_NOTHING"')
  )
  assert plain["plans"] == other["plans"]


def test_prices_of_unknown_devices_are_refused(capsys):
  assert run(*PLAN, "--topology=h100-8", "--price=h10:9,2") == 2
  error = capsys.readouterr().err
  assert "there is no kind of device h10. Did you mean h100?" in error
  assert planned(capsys, *PLAN, "--topology=H100-8", "--price=H100: 2")["cost_of_billion_tokens"]


def test_a_typo_in_any_topology_is_found_first(capsys):
  assert run(*PLAN, "--topology=v5e-4,v5e-5") == 2
  assert "--topology=v5e-5: there is no such slice" in capsys.readouterr().err


def test_a_topology_whose_meshes_do_not_divide_the_batch_is_named(capsys):
  assert run(*PLAN, "--topology=v5e-4,v5e-64", "--global_batch=4") == 2
  assert "paxlike: --topology=v5e-64: no mesh of 64 devices divides" in capsys.readouterr().err
