# SPDX-License-Identifier: Apache-2.0
"""`--mode=check` passes where all is well, and names what is not."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.program import run

from paxlike import checks, layers, root_graph, run_mode
from paxlike.checks import attention, bandwidth, differences, runner, step, storage, trainers
from paxlike.checks.check import compared, guarded
from paxlike.cli import check_page, command_line
from paxlike.devices.mesh import AXES
from paxlike.training import update

# Experiment and axes of the mesh of eight devices.
MIXES = {
  "data": ("Synthetic126M", {"data": 8}),
  "fsdp x expert x tensor": ("Mixtral8x7B", {"fsdp": 2, "expert": 2, "tensor": 2}),
  "pipeline x context": ("Synthetic126M", {"pipeline": 2, "context": 4}),
}
ITEMS = {
  *("devices", "attention", "training step", "collectives", "host offload", "checkpoint", "input"),
}
OF_ONE_DEVICE = {"grouped matmuls", "8-bit matmuls"}


def checked(capsys, *flags):
  """Returns the exit status and what the mode says for programs."""
  status = run("--mode=check", "--json", *flags)
  return status, json.loads(capsys.readouterr().out)


def of_item(page, item):
  return [check for check in page["checks"] if check["item"] == item]


@pytest.fixture
def only(monkeypatch):
  """Returns a function that leaves out all checks but those of one module."""
  others = {
    attention: "kernels",
    runner.grouped: "matmuls",
    runner.precision: "matmuls",
    step: "steps",
    runner.bandwidth: "collectives",
    storage: "saved",
    runner.transfers: "input_rate",
  }

  def leave(kept):
    for module, name in others.items():
      if module is not kept:
        monkeypatch.setattr(module, name, lambda *args, **options: iter(()))

  return leave


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_passes(capsys, monkeypatch, tmp_path, mix):
  compared_steps = []

  def compare(*arguments, **options):
    compared_steps.append(arguments)
    return differences.compare(*arguments, **options)

  monkeypatch.setattr(step, "compare", compare)
  if mix != "data":
    monkeypatch.setattr(attention, "CASES", attention.CASES[:2])
    for module in (runner.grouped, runner.precision):  # On one device, whatever the mesh is.
      monkeypatch.setattr(module, "matmuls", lambda devices: iter(()))
  name, axes = MIXES[mix]
  shape = f"--fdl.ICI_MESH_SHAPE={axes}"
  flags = (f"--fdl_config={name}", shape, f"--job_log_dir={tmp_path / 'run'}")
  if mix != "data":
    # XLA for CPUs ends the process at sums of bfloat16 over devices, unless it starts with a flag
    # that `starting.set_up_jax` sets.
    flags += ("--fdl.FPROP_DTYPE=float32", "--fdl.EMA_HALF_LIVES=[10]")
  status, page = checked(capsys, *flags)
  verdicts = {check["name"]: check["verdict"] for check in page["checks"]}
  assert checks.FAIL not in verdicts.values(), page
  assert status == 0 and page["passed"]
  items = {check["item"] for check in page["checks"]}
  assert items == ITEMS | (OF_ONE_DEVICE if mix == "data" else set())
  kernels = {
    check["name"].split(":")[0] for check in page["checks"] if check["item"] == "attention"
  }
  assert ("ring" in kernels) == ("context" in axes)
  _, gradients, update, *_ = (check["figures"] for check in of_item(page, "training step"))
  assert 0 < gradients["worst gradient"] < gradients["tolerance"] < 1e-3
  assert update["error"] < update["tolerance"]
  assert len(compared_steps) == (2 if mix == "data" else 1)
  for _, got, *others in compared_steps:  # What passed would not have, were it 5 % off.
    longer = {n: 1.05 * g for n, g in got.gradients.items()}
    for broken in (longer, got.gradients | {n: longer[n] for n in ("embedding.table",)}):
      found = differences.compare("x", got._replace(gradients=broken), *others)
      assert found[1].verdict == checks.FAIL
  assert list(tmp_path.iterdir()) == []  # Also what was saved is gone.


def ignores_segments(q, k, v, *, segments_BT, **options):
  return layers.xla(q, k, v, segments_BT=None, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled_back(factor, y):
  return y


scaled_back.defvjp(lambda factor, y: (y, None), lambda factor, _, dy: (factor * dy,))


def wrong_gradient(q, k, v, **options):
  return layers.xla(q, scaled_back(1.001, k), v, **options)


@pytest.mark.parametrize(
  ("kernel", "wrong"),
  [(ignores_segments, {"value", "dq", "dk", "dv"}), (wrong_gradient, {"dk"})],
  ids=["segments", "gradient"],
)
def test_a_broken_kernel_is_named(capsys, monkeypatch, only, kernel, wrong):
  only(attention)
  broken = layers.KERNELS["xla_chunked"]._replace(function=kernel)
  monkeypatch.setitem(layers.KERNELS, "xla_chunked", broken)
  monkeypatch.setattr(attention, "CASES", attention.CASES[:1])
  status, page = checked(capsys, "--fdl.ICI_MESH_SHAPE=[8,1,1]")
  assert status == 1 and not page["passed"]
  (failed,) = [check for check in page["checks"] if check["verdict"] == checks.FAIL]
  assert failed["name"].startswith("xla_chunked: ")
  named = failed["detail"].removeprefix("wrong: ").split(", ")
  assert {error.split()[0] for error in named} == wrong


@pytest.mark.slow
def test_a_broken_gradient_and_a_broken_update_on_the_mesh_are_named(capsys, monkeypatch, only):
  only(step)
  updated, broken, kept = update._updated, "stack.pattern.0.mlp.up.w", "positions.table"

  def wrong(definition, optimizer, state, grads, noticed):
    if jax.sharding.get_abstract_mesh().size == 1:
      return updated(definition, optimizer, state, grads, noticed)
    grads = grads | {broken: grads[broken].at[1].multiply(1.001)}
    new, *others = updated(definition, optimizer, state, grads, noticed)
    return new | {kept: state.params[kept]}, *others

  monkeypatch.setattr(update, "_updated", wrong)
  assert run("--mode=check", "--fdl.ICI_MESH_SHAPE=[2,4,1]", "--fdl.FPROP_DTYPE=float32") == 1
  page = capsys.readouterr().out
  assert "worst of 34 gradients: stack.layers.1.mlp.up.w (1 wrong)" in page
  assert "worst of 62 weights and moments: positions.table (1 wrong)" in page
  failed = [line for line in page.splitlines() if line.startswith("FAIL  ")]
  step_of = "FAIL  training step: float32, shrunk"
  assert failed == [f"{step_of}: gradients", f"{step_of}: update"]


@pytest.mark.slow
def test_a_step_that_fails_in_float32_keeps_none_from_the_other(capsys, monkeypatch, only):
  only(step)
  both = step._both

  def fails(graph, build, is_exact, full):
    if is_exact:
      raise RuntimeError("no such program")
    return both(graph, build, is_exact, full)

  monkeypatch.setattr(step, "_both", fails)
  assert run("--mode=check", "--fdl_config=TinyPython", "--fdl.FPROP_DTYPE=bfloat16") == 1
  page = capsys.readouterr().out
  assert "RuntimeError: no such program" in page and "own dtype, shrunk" in page


def graph_of(*words):
  options = command_line.parse(["paxlike", "--mode=check", *words])
  return root_graph.of(options, root_graph.experiment_of(options))


@pytest.mark.parametrize(
  ("name", "axis", "dims"),
  [
    ("Mixtral8x7B", "expert", {"experts"}),
    ("SyntheticLLaMA70B", "tensor", {"heads", "kv_heads", "ffn", "vocab"}),
    ("Synthetic126M", "fsdp", {"model"}),
  ],
)
def test_a_small_model_is_sharded_as_the_large_one(monkeypatch, name, axis, dims):
  graph = graph_of(f"--fdl_config={name}", f"--fdl.ICI_MESH_SHAPE={{{axis}: 8}}")
  small = trainers.trained(graph, run_mode.build_trainer, full=False)
  sharded = {pair for found in trainers._sharded_dims(small).values() for pair in found}
  assert sharded == {(dim, axis) for dim in dims}
  assert trainers.not_sharded(graph, run_mode.build_trainer, small) == []
  if axis == "expert":  # What is lost is said.
    monkeypatch.setattr(trainers, "_SHARDED", ())
    small = trainers.trained(graph, run_mode.build_trainer, full=False)
    assert trainers.not_sharded(graph, run_mode.build_trainer, small) == ["experts over expert"]


def test_adapters_have_gradients():
  graph = graph_of("--fdl.USE_LORA=True")
  trainer = trainers.trained(graph, run_mode.build_trainer, full=False)
  step._draw_adapters(trainer)
  drawn = {n: s.init for n, s in trainer.definition.weights.items() if n.endswith(".lora.b")}
  assert drawn and all(init(jax.random.key(0), (2, 2), 2).all() for init in drawn.values())


def test_the_page_and_its_json_hold_the_same_verdicts(capsys):
  def results():
    yield compared("a", "good", {"value": 1}, {"value": 1}, 1e-6)
    yield compared("a", "bad", {"value": float("nan"), "dq": 1}, {"value": 1, "dq": 1}, 1e-6)
    yield guarded("b", "not supported", refuse, may_refuse=True)
    yield guarded("b", "too large", fail)

  def refuse() -> Any:
    x = jnp.ones((1, 8, 1, 8))
    return layers.cudnn(x, x, x, scale=1.0, segments_BT=None)

  def fail() -> Any:
    raise jax.errors.JaxRuntimeError("no\nmemory")

  assert check_page.show(results(), as_json=True) == 1
  found = json.loads(capsys.readouterr().out)
  verdicts = [check["verdict"] for check in found["checks"]]
  assert verdicts == ["pass", "FAIL", "refused", "FAIL"]
  assert found["checks"][1]["figures"]["error"] is None
  assert check_page.show(results(), as_json=False) == 1
  lines = capsys.readouterr().out.splitlines()
  shown = [line.split()[0] for line in lines if line.startswith("  ")]
  assert shown == verdicts
  assert "bfloat16" in lines[5]
  assert lines[-3:-1] == ["FAIL  a: bad", "FAIL  b: too large"]
  assert lines[-1].startswith("FAIL: 1 pass, 2 FAIL, 1 refused")
  passing = [compared("a", "good", {"value": 1}, {"value": 1}, 1e-6)]
  assert check_page.show(passing, as_json=False) == 0


def test_a_factor_within_rounding_is_found():
  exact = {"y": np.random.default_rng(0).normal(size=1000)}
  rounded = {"y": exact["y"].astype(jnp.bfloat16)}
  off = {"y": (1.01 * exact["y"]).astype(jnp.bfloat16)}
  assert compared("a", "b", rounded, exact, 0.03).verdict == checks.PASS
  check = compared("a", "b", off, exact, 0.03)
  assert check.verdict == checks.FAIL and check.detail == "wrong: scale of y 0.01"


def test_packed_batches_reach_the_devices(monkeypatch, text):
  graph = graph_of("--fdl_config=Text126M", f"--fdl.DATA_PATH={text}", "--fdl.MAX_SEQ_LEN=16")
  trainer = run_mode.build_trainer(graph)
  put, names = trainer.placer.put, set()
  monkeypatch.setattr(trainer.placer, "put", lambda arrays: names.update(arrays) or put(arrays))
  (check,) = runner.transfers.input_rate(trainer)
  assert check.verdict == checks.PASS
  assert "segments" in names and names == set(trainer.train_data.no_rows())


def test_small_gradients_count_beside_large_ones():
  limits = differences.Tolerances(loss=1e-3, gradient=1e-3, total=1e-3, floor=1e-2)
  exact = differences.Step(1.0, 1.0, {"large": np.ones(4), "small": np.full(4, 0.02)})

  def compare(gradients, rounded=None):
    given = None if rounded is None else exact._replace(gradients=exact.gradients | rounded)
    got = exact._replace(gradients=gradients)
    return differences.compare("x", got, exact, limits, given)[1]

  assert compare(exact.gradients).verdict == checks.PASS
  off = exact.gradients | {"small": np.full(4, 0.0201)}
  assert compare(off).verdict == checks.FAIL and "small (1 wrong)" in compare(off).detail
  # Unless one device is as far from float32 by rounding alone.
  assert compare(off, {"small": np.full(4, 0.01998)}).verdict == checks.FAIL
  assert compare(off, {"small": np.full(4, 0.0199)}).verdict == checks.PASS
  assert compare({"large": np.ones(4)}).verdict == checks.FAIL


def test_equal_bits_on_one_device_are_no_proof():
  one = differences.Step(1.0, 1.0, {"w": np.ones(4), "b": np.full(4, 1e-9)})
  compare = functools.partial(differences.compare, "x", limits=differences.FLOAT32)
  assert [c.verdict for c in compare(one, one, may_be_same=True)] == [checks.ABSENT]
  several = compare(one, one)
  assert [c.verdict for c in several] == [checks.PASS] * 2
  assert "1 more are zero except for rounding" in several[1].detail
  assert [c.verdict for c in compare(one._replace(loss=1.1), one, may_be_same=True)] == [
    checks.FAIL,
    checks.PASS,
  ]


def test_collectives_over_long_axes_can_be_traced():
  """With places beyond int32; an all-gather's result is no larger than over short axes."""
  sizes = tuple(256 if axis == "fsdp" else 1 for axis in AXES)
  devices = jax.sharding.AbstractMesh(sizes, AXES)
  for kind in bandwidth.KINDS:
    count = bandwidth.per_device(kind, 256, most=2**24)
    make, run, wrong = bandwidth.programs(kind, "fsdp", devices, count)
    x = jax.eval_shape(make)
    assert x.size == 256 * count and jax.eval_shape(wrong, x).shape == ()
    assert jax.eval_shape(run, x).size <= 256 * 2**24
  assert all((bandwidth._start(n, 2**24) - n * 2**24) % 251 == 0 for n in range(256))


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (("--fdl.ICI_MESH_SHAPE={pipeline: 8}", "--fdl.NUM_LAYERS=4"), "NUM_STAGES=8"),
    (("--fdl_config=Text126M", "--full", "--fdl.DATA_PATH=nosuch.txt"), "nosuch.txt"),
  ],
  ids=["layers", "data"],
)
def test_a_mistake_is_one_line(capsys, flags, said):
  assert run("--mode=check", *flags) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1 and len(err) < 300 and said in err


def test_no_checkpoint_is_saved_where_saving_is_disabled(capsys, tmp_path, only):
  only(storage)
  status, page = checked(
    capsys, f"--job_log_dir={tmp_path / 'run'}", "--enable_checkpoint_saving=false"
  )
  (saved,) = of_item(page, "checkpoint")
  assert status == 0 and saved["verdict"] == checks.ABSENT
  assert list(tmp_path.iterdir()) == []


def test_a_mesh_that_does_not_fit_is_a_mistake(capsys):
  assert run("--mode=check", "--fdl.ICI_MESH_SHAPE=[3,1,1]") == 2
  assert "8 devices are available" in capsys.readouterr().err
