# SPDX-License-Identifier: Apache-2.0
"""Laws of training that multiplies in 8 bits, whatever they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.jaxprs import equations
from helpers.program import TINY, curve, run
from helpers.shrunk import shrunk
from helpers.steps import ONE, by_layer, distance, one_device, steps
from helpers.tiny_model import adamw, batch

from paxlike.devices.mesh import MeshSpec
from paxlike.training import train_state
from paxlike.training.train_step import make_train_step

KINDS = ("fp8", "fp8_delayed", "mxfp8", "int8")
DENSE, SPARSE = "SyntheticLLaMA70B", "Mixtral8x7B"


@functools.cache
def trained(name, kind, num_steps=3):
  return one_device(shrunk(name, QUANTIZATION=kind), batch(8), num_steps=num_steps)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "kind", "tolerance"),
  [
    (DENSE, "fp8_delayed", 0.3),
    (DENSE, "mxfp8", 1.5),
    (DENSE, "int8", 1.5),
    (SPARSE, "fp8", 1.5),
  ],
)
def test_however_it_is_computed_it_is_the_same_rounding(name, kind, tolerance):
  """What is left is that a sum in another order may be rounded the other way.

  After that chance draws anew in all of int8, and routers may choose other experts.
  """
  spec = MeshSpec(ici={"fsdp": 2, "expert": 2, "tensor": 2})
  definition = shrunk(name, scan=True, remat="SAVE_NOTHING", QUANTIZATION=kind)
  parts = 1 if kind == "int8" else 2
  got = steps(definition, spec, batch(8), num_steps=3, num_microbatches=parts)
  rounding = distance(trained(name, kind), trained(name, None))
  assert rounding > 0
  assert distance(got, trained(name, kind)) < tolerance * rounding
  loss, expected = got[1]["loss"], trained(name, kind)[1]["loss"]
  np.testing.assert_allclose(loss[0] / loss[1], expected[0] / expected[1], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "kind"), [*((DENSE, kind) for kind in KINDS), (SPARSE, "fp8_delayed")]
)
def test_weights_go_nearly_where_unrounded_products_take_them(name, kind):
  definition = shrunk(name)
  state = train_state.create(definition, adamw(), ONE.build(jax.devices()[:1]), seed=1)
  before = by_layer(definition, state.params)
  exact, rough = (
    np.concatenate([(after[name] - before[name]).ravel() for name in before])
    for after in (trained(name, None)[0], trained(name, kind)[0])
  )
  assert exact @ rough > 0.995 * np.linalg.norm(exact) * np.linalg.norm(rough)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mxfp8"])
def test_weights_are_rounded_once_a_step_however_many_parts_it_has(kind):
  definition, optimizer = shrunk(DENSE, QUANTIZATION=kind), adamw()
  built = ONE.build(jax.devices()[:1])
  state = train_state.abstract(definition, optimizer, built)
  step = make_train_step(definition, optimizer, seed=1, num_microbatches=2)
  program = jax.make_jaxpr(step)(state, batch(8))
  weight = definition.weights["stack.layers.0.mlp.up.w"].shape
  small = jnp.dtype(jnp.int8 if kind == "int8" else jnp.float8_e4m3fn)
  found = [
    inside
    for one, inside in equations(program.jaxpr)
    if one.primitive.name == "convert_element_type"
    and (one.outvars[0].aval.dtype, one.outvars[0].aval.shape) == (small, weight)
  ]
  assert len(found) >= 2 and not any("scan" in inside for inside in found)


@pytest.mark.slow
def test_what_layers_noticed_is_no_weight():
  definition = shrunk(DENSE, QUANTIZATION="fp8_delayed")
  *_, state = trained(DENSE, "fp8_delayed")
  assert state.extra.keys() == set(definition.statistics)
  assert definition.num_params == shrunk(DENSE).num_params
  names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.opt_state)]
  assert not [name for name in names if ".dot." in name]
  for name, seen in state.extra.items():
    # Three steps, the newest first.
    assert np.all(np.asarray(seen[:3]) > 0) and np.all(np.asarray(seen[3:]) == 0), name
  parts = one_device(definition, batch(8), num_steps=1, num_microbatches=4)[2]
  whole = one_device(definition, batch(8), num_steps=1)[2]
  for name, seen in whole.extra.items():
    np.testing.assert_allclose(parts.extra[name], seen, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_experts_together_notice_what_those_of_one_device_do():
  """Also where devices have the same rows: two for eight devices."""
  definition, data = shrunk(SPARSE, QUANTIZATION="fp8_delayed"), batch(2)
  spec = MeshSpec(ici={"data": 2, "expert": 4})
  got = steps(definition, spec, data, devices=jax.devices(), num_steps=1)[2]
  expected = one_device(definition, data, num_steps=1)[2]
  assert [name for name in expected.extra if ".experts." in name]
  for name, seen in expected.extra.items():
    np.testing.assert_allclose(got.extra[name], seen, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_not_remembered():
  definition, optimizer = shrunk(DENSE, QUANTIZATION="fp8_delayed"), adamw()
  good = batch(8)
  built = ONE.build(jax.devices()[:1])
  with jax.set_mesh(built):
    state = train_state.create(definition, optimizer, built, seed=1)
    step = jax.jit(make_train_step(definition, optimizer, seed=1))
    before, _ = step(state, good)
    after, _ = step(before, good | {"weights": good["weights"] * np.nan})
  assert int(after.skipped) == 1
  for name, seen in before.extra.items():
    np.testing.assert_array_equal(after.extra[name], seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8_delayed", "mxfp8"])
def test_adapters_train_beside_a_base_in_8_bits(kind):
  definition = shrunk(DENSE, QUANTIZATION=kind, USE_LORA=True)
  _, metrics, state = one_device(definition, batch(8), num_steps=3)
  assert np.isfinite(metrics["loss"][0])
  assert all(".lora." in name for name in state.params) and len(state.frozen) > 10
  assert all(np.all(np.asarray(seen[:3]) > 0) for seen in state.extra.values())
  assert (kind == "fp8_delayed") == bool(state.extra)


@pytest.mark.slow
def test_a_run_may_begin_and_cease_to_multiply_in_8_bits(tmp_path, capsys):
  flags = (*TINY, f"--job_log_dir={tmp_path}", "--fdl.MAX_STEPS=6")
  for number, kind in ((2, "none"), (4, "fp8_delayed"), (6, "none")):
    assert run(*flags, f"--fdl.num_steps={number}", f"--fdl.QUANTIZATION={kind}") == 0
  assert "resuming from checkpoint 4" in capsys.readouterr().out
  assert [updates for updates, loss in curve(tmp_path) if np.isfinite(loss)] == list(range(1, 7))


@pytest.mark.slow
def test_a_resumed_run_remembers(tmp_path):
  flags = (*TINY, "--fdl.QUANTIZATION=fp8_delayed", "--fdl.MAX_STEPS=6")
  assert run(*flags, f"--job_log_dir={tmp_path / 'whole'}") == 0
  for number in (3, 6):
    assert run(*flags, f"--job_log_dir={tmp_path / 'parts'}", f"--fdl.num_steps={number}") == 0
  assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
