# SPDX-License-Identifier: Apache-2.0
"""A step on any mesh, in any layout, in any number of microbatches is the same step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo
from helpers.steps import ONE, assert_same, one_device, steps
from helpers.tiny_model import SEQ_LEN, VOCAB, adamw, batch, tiny
from jax._src.ad_checkpoint import saved_residuals  # Has no public name any more.

from paxlike.devices.mesh import MeshSpec
from paxlike.layers import Remat
from paxlike.layers.decoder import forward
from paxlike.training import optimizers, train_state
from paxlike.training.objectives import NextToken
from paxlike.training.train_step import make_train_step

pytestmark = pytest.mark.slow

SLOW = pytest.mark.slow


@functools.cache
def reference(*, packed=False, num_steps=2, **model):
  """What others must equal: one device, unrolled, one microbatch, everything saved."""
  return one_device(tiny(**model), batch(packed=packed), num_steps=num_steps)


@pytest.mark.parametrize(
  ("ici", "dcn", "scan"),
  [
    pytest.param((2, 1, 4), (1, 1, 1), True, marks=SLOW),
    pytest.param((2, 2, 2), (1, 1, 1), False, marks=SLOW),
    ((1, 2, 2), (2, 1, 1), True),
  ],
)
def test_every_mesh_equals_one_device(ici, dcn, scan):
  data = batch(packed=True)
  got = steps(tiny(scan=scan), MeshSpec(ici=ici, dcn=dcn), data)
  assert_same(got, reference(packed=True))


@pytest.mark.slow
def test_scan_equals_unroll():
  assert_same(one_device(tiny(scan=True, dropout=0.3), batch()), reference(dropout=0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("policy", "scan"),
  [
    (Remat.SAVE_NOTHING, True),
    (Remat.SAVE_DOT_ONLY, True),
    (Remat.SAVE_DOT_WITH_NO_BATCH_DIM, False),
    (Remat.SAVE_QKV_PROJ, True),
    (Remat.SAVE_QKV_OUT_PROJ, False),
    (Remat.OFFLOAD_QKV_PROJ, True),
    (Remat.OFFLOAD_DOT_WITH_NO_BATCH_DIM, True),
  ],
)
def test_rematerialisation_changes_nothing(policy, scan):
  got = one_device(tiny(dropout=0.3, scan=scan, remat=policy), batch())
  assert_same(got, reference(dropout=0.3))


def saved(policy: Remat) -> list[tuple[int, ...]]:
  """Returns the shapes of what a step saves of its layers, without the weights."""
  definition, data = tiny(remat=policy), batch()
  params = train_state.init_params(definition, ONE.build(jax.devices()[:1]), seed=1)

  def loss(params):
    model = definition.bind(params)
    return NextToken().total(model, None, data, None)[0]

  residuals: Any = saved_residuals(loss, params)
  return [x.shape for x, where in residuals if "argument" not in where and x.ndim > 2]


def test_policies_save_projections_by_role():
  # Of each of two layers q, k and v, for 8 rows of 16 tokens; its input is saved in any case.
  heads = (8, 16, 4, 8)
  assert saved(Remat.SAVE_NOTHING).count(heads) == 0
  assert saved(Remat.SAVE_QKV_PROJ).count(heads) == 6
  both = saved(Remat.SAVE_QKV_OUT_PROJ)
  assert both.count(heads) == 6
  assert len(both) == len(saved(Remat.SAVE_QKV_PROJ)) + 2


@pytest.mark.parametrize("mix", [{"data": 1}, {"fsdp": 2}])
def test_an_optimizer_on_the_host_is_the_same(mix):
  optimizer, devices = adamw(on_host=True), jax.devices()[: max(mix.values())]
  got = steps(tiny(), MeshSpec(ici=mix), batch(), devices=devices, optimizer=optimizer)
  assert_same(got, reference())
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(got[2].opt_state) if x.ndim}
  assert kinds == {"pinned_host"}
  assert {w.sharding.memory_kind for w in got[2].params.values()} == {"device"}
  target = train_state.abstract(tiny(), optimizer, MeshSpec(ici=mix).build(devices))
  for x, like in zip(*map(jax.tree.leaves, (got[2].opt_state, target.opt_state)), strict=True):
    assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("num_microbatches", "num_devices"), [pytest.param(4, 1, marks=SLOW), (2, 2)]
)
def test_accumulation_equals_one_batch(num_microbatches, num_devices):
  # Rows carry unequal weights, so a mean of means would differ.
  spec = MeshSpec(ici=(num_devices, 1, 1))
  devices = jax.devices()[:num_devices]
  got = steps(tiny(), spec, batch(), devices=devices, num_microbatches=num_microbatches)
  assert_same(got, reference())


def test_a_step_that_is_not_finite_is_skipped_and_counted():
  optimizer = adamw()
  definition = tiny()
  good = batch()
  bad = good | {"weights": good["weights"] * np.nan}
  built = ONE.build(jax.devices()[:1])
  with jax.set_mesh(built):
    state = train_state.create(definition, optimizer, built, seed=1)
    step = jax.jit(make_train_step(definition, optimizer, seed=1))
    before, _ = step(state, good)
    after, metrics = step(before, bad)
  assert (int(after.step), int(after.skipped)) == (2, 1)
  assert float(metrics["skipped"][0]) == 1
  counts = []
  for (path, old), new in zip(
    jax.tree.leaves_with_path((before.params, before.opt_state)),
    jax.tree.leaves((after.params, after.opt_state)),
    strict=True,
  ):
    if not np.array_equal(old, new):
      counts.append((jax.tree_util.keystr(path), int(old), int(new)))
  assert counts == [("[1][3].count", 1, 2)]  # The schedule's: rates are those of steps.


def test_a_step_updates_weights_and_moments_in_place():
  optimizer, definition = adamw(), tiny()
  built = ONE.build(jax.devices()[:1])
  with jax.set_mesh(built):
    state = train_state.abstract(definition, optimizer, built)
    step = jax.jit(make_train_step(definition, optimizer, seed=1), donate_argnums=0)
    program = hlo.text(step, state, batch())
  found = {one.name: one for one in hlo.instructions(program)}
  copied = [found[one.operands[0]] for one in found.values() if one.operation == "copy"]
  given = ("parameter", "get-tuple-element")  # Of the step, and of its branches.
  assert not [one.name for one in copied if one.operation in given and one.outputs[0].dims]


def test_a_first_step_that_is_not_finite_is_in_no_average():
  optimizer, definition, good = optimizers.averaged(adamw(), half_lives=(9.0,)), tiny(), batch()
  built = ONE.build(jax.devices()[:1])
  with jax.set_mesh(built):
    state = train_state.create(definition, optimizer, built, seed=1)
    step = jax.jit(make_train_step(definition, optimizer, seed=1))
    for data in (good | {"weights": good["weights"] * np.nan}, good):
      state, _ = step(state, data)
  assert optimizer.evaluated is not None
  averages = optimizer.evaluated(state.opt_state, state.params)
  for name, w in definition.optimized(state.params).items():
    np.testing.assert_allclose(averages[name], w, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_dropout_depends_on_the_step_and_on_nothing_else():
  again = one_device(tiny(dropout=0.3), batch())
  assert_same(again, reference(dropout=0.3), atol=0)
  assert again[1]["loss"][0] != reference()[1]["loss"][0]


def test_packed_documents_do_not_see_each_other():
  definition = tiny()
  data = batch(4, packed=True)
  built = ONE.build(jax.devices()[:1])
  with jax.set_mesh(built):
    params = train_state.init_params(definition, built, seed=0)
  # Each document once more, in a row of its own: what follows it there, it cannot see.
  places = [
    (row, np.flatnonzero(data["segments"][row] == segment))
    for row in range(4)
    for segment in np.unique(data["segments"][row])
  ]
  alone = np.zeros((len(places), SEQ_LEN), np.int32)
  for document, (row, index) in enumerate(places):
    alone[document, : len(index)] = data["inputs"][row, index]
  logits = jax.jit(functools.partial(forward, definition))
  packed, separate = logits(params, data)[0], logits(params, {"inputs": alone})[0]
  for document, (row, index) in enumerate(places):
    np.testing.assert_allclose(packed[row, index], separate[document, : len(index)], atol=1e-5)


@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
  exact = reference(num_steps=1)
  rough = one_device(tiny(dtype=jnp.bfloat16), batch(), num_steps=1)
  assert rough[2].params["embedding.table"].dtype == jnp.float32
  loss = exact[1]["loss"][0] / exact[1]["loss"][1]
  assert abs(loss - np.log(VOCAB)) < 0.5
  np.testing.assert_allclose(rough[1]["loss"][0] / rough[1]["loss"][1], loss, rtol=0.01)
