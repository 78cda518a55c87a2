# SPDX-License-Identifier: Apache-2.0
"""Pipelines beyond the equality of their steps: memory, other losses, evaluation, bad knobs."""

import dataclasses
import functools
import re
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.jaxprs import equations
from helpers.steps import assert_same, one_device, steps
from helpers.tiny_model import adamw, batch, tiny

from paxlike import registry
from paxlike.devices import mesh
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers import Pipeline
from paxlike.layers.decoder import forward
from paxlike.layers.pipeline.jaxpr_dependence import depends_on_inputs
from paxlike.layers.stack_layout import Layout
from paxlike.training import train_state
from paxlike.training.objectives import Dpo, NextToken
from paxlike.training.train_step import make_train_step, note_on_memory

CHUNKS = {"gpipe": 1, "circular": 2, "1f1b": 1, "interleaved_1f1b": 2}


def pipeline(schedule: str, *, microbatches: int = 4, recompute: bool = True) -> Pipeline:
  return Pipeline(
    schedule=schedule,
    stages=2,
    chunks=CHUNKS[schedule],
    microbatches=microbatches,
    recompute=recompute,
  )


def temporary_bytes(schedule: str, microbatches: int) -> int:
  """Returns what a step on two stages holds besides its arguments, for rows of equal number."""
  how = pipeline(schedule, microbatches=microbatches)
  definition, optimizer = tiny(num_layers=4, scan=True, pipeline=how), adamw()
  built = MeshSpec(ici={"pipeline": 2}).build(jax.devices()[:2])
  with jax.set_mesh(built):
    state = train_state.abstract(definition, optimizer, built)
    arrays = {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch(8 * microbatches).items()
    }
    step = jax.jit(make_train_step(definition, optimizer, seed=1), donate_argnums=0)
    found: Any = step.lower(state, arrays).compile().memory_analysis()
    return found.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
  ("schedule", "grows"), [("1f1b", False), ("interleaved_1f1b", False), ("circular", True)]
)
def test_memory_grows_with_microbatches_only_without_1f1b(schedule, grows):
  hidden = 4 * 32 * batch(8)["inputs"].size  # Bytes of a microbatch's activations.
  few, many = (temporary_bytes(schedule, count) for count in (4, 16))
  if grows:
    assert many - few > 12 * hidden
  else:
    assert many - few < 2 * hidden  # The tokens themselves do.


@functools.cache
def pairs() -> dict[str, np.ndarray]:
  """Rows of two answers each, on which a model's preference can be trained."""
  data = batch(8)
  segments = np.repeat([[1, 2]], 8, 0).repeat(data["inputs"].shape[1] // 2, 1).astype(np.int32)
  positions = np.tile(np.arange(segments.shape[1] // 2, dtype=np.int32), (8, 2))
  return data | {"segments": segments, "positions": positions}


class Tripled(NextToken):
  """An objective of a user."""

  def total(self, model, reference, batch, dropout):
    loss, aux = super().total(model, reference, batch, dropout)
    return 3 * loss, aux


def test_a_schedule_that_does_not_bound_the_memory_of_an_objective_says_so():
  one, staged = (tiny(num_layers=4, scan=True, pipeline=p) for p in (None, pipeline("1f1b")))
  said = note_on_memory(staged, Tripled())
  assert said is not None and "PIPELINE_SCHEDULE=1f1b" in said and "Tripled" in said
  assert note_on_memory(staged, NextToken()) is None
  assert note_on_memory(one, Tripled()) is None
  assert note_on_memory(tiny(num_layers=4, scan=True, pipeline=pipeline("gpipe")), Dpo()) is None


@pytest.mark.slow
def test_a_subclass_of_an_objective_is_not_taken_for_its_base():
  spec, devices, data = MeshSpec(ici={"pipeline": 2}), jax.devices()[:2], batch(8)
  staged = tiny(num_layers=4, scan=True, pipeline=pipeline("1f1b"))
  got = steps(staged, spec, data, devices=devices, objective=Tripled())
  assert_same(got, one_device(tiny(num_layers=4), data, objective=Tripled()))


@pytest.mark.slow
def test_other_objectives_are_differentiated_through_the_stages():
  spec = MeshSpec(ici={"pipeline": 2, "data": 2})
  options = {"objective": Dpo(), "devices": jax.devices()[:4]}

  def trained(definition, spec, devices, objective):
    optimizer, built = adamw(), spec.build(devices)
    with jax.set_mesh(built):
      state = train_state.create(definition, optimizer, built, seed=1)
      reference = {name: 0.9 * w for name, w in state.weights.items()}
      state = jax.tree.map(jnp.copy, dataclasses.replace(state, reference=reference))
      step = jax.jit(make_train_step(definition, optimizer, seed=1, objective=objective))
      _, metrics = step(state, pairs())
    return jax.device_get(metrics)

  got = trained(tiny(num_layers=4, scan=True, pipeline=pipeline("circular")), spec, **options)
  expected = trained(
    tiny(num_layers=4), MeshSpec(ici=(1, 1, 1)), jax.devices()[:1], options["objective"]
  )
  assert got["grad_norm"][0] > 0
  for name, (total, _) in expected.items():
    np.testing.assert_allclose(got[name][0], total, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("size", [8, 3])
def test_evaluation_is_that_of_one_device(schedule, size):
  """Rows that do not divide into microbatches go through the layers one after another."""
  data, plain = batch(size), tiny(num_layers=4)
  expected = logits(plain, data, {"data": 1})
  stages = tiny(num_layers=4, scan=True, pipeline=pipeline(schedule))
  np.testing.assert_allclose(logits(stages, data, {"pipeline": 2}), expected, atol=1e-4)


def logits(definition, data, mix):
  built = MeshSpec(ici=mix).build(jax.devices()[: max(mix.values())])
  with jax.set_mesh(built):
    params = train_state.init_params(definition, built, seed=1)
    return jax.device_get(jax.jit(functools.partial(forward, definition))(params, data)[0])


@pytest.mark.slow
def test_accumulation_of_pipelines_is_one_device_in_as_many_parts():
  data = batch(16)
  stages = tiny(num_layers=4, scan=True, dropout=0.1, pipeline=pipeline("1f1b", microbatches=2))
  spec, devices = MeshSpec(ici={"pipeline": 2}), jax.devices()[:2]
  got = steps(stages, spec, data, devices=devices, num_microbatches=2)
  assert_same(got, one_device(tiny(num_layers=4, dropout=0.1), data, num_microbatches=4))


@pytest.mark.slow
def test_layers_before_and_after_the_stages_are_those_of_one_device():
  how = pipeline("interleaved_1f1b")
  options: dict[str, Any] = {"num_layers": 4, "ends": True, "dropout": 0.1}
  spec, data = MeshSpec(ici={"pipeline": 2, "fsdp": 2}), batch(8)
  got = steps(tiny(scan=True, pipeline=how, **options), spec, data, devices=jax.devices()[:4])
  assert_same(got, one_device(tiny(**options), data, num_microbatches=4))


def operations(how: Pipeline) -> list[Any]:
  """Returns the equations in the ticks of a training step, and what they are inside of."""
  definition, optimizer = tiny(num_layers=4, scan=True, pipeline=how), adamw()
  built = MeshSpec(ici={"pipeline": 2}).build(jax.devices()[:2])
  with jax.set_mesh(built):
    state = train_state.abstract(definition, optimizer, built)
    step = make_train_step(definition, optimizer, seed=1)
    program = jax.make_jaxpr(step)(state, batch(8))
  return [(one, inside) for one, inside in equations(program.jaxpr) if "scan" in inside]


def test_only_ticks_that_begin_or_end_a_microbatch_embed():
  """Its lookup and its gradient are in branches of the loops over ticks."""
  table = tiny().weights["embedding.table"].shape
  found = [
    (one.primitive.name, "cond" in inside)
    for one, inside in operations(pipeline("interleaved_1f1b"))
    if one.primitive.name in ("gather", "scatter-add") and one.invars[0].aval.shape == table
  ]
  assert set(found) == {("gather", True), ("scatter-add", True)}


@pytest.mark.parametrize(("recompute", "ordered"), [(True, 0), (False, 2)])
def test_gradients_of_unrolled_layers_are_ordered(recompute, ordered):
  barriers = [
    len(one.outvars)
    for one, _ in operations(pipeline("1f1b", recompute=recompute))
    if one.primitive.name == "optimization_barrier"
  ]
  # Of each layer of a stage, in the phase of both kinds of ticks and in that of backward ticks.
  assert sum(count > 1 for count in barriers) == 2 * ordered


def test_chunks_of_a_stage_follow_each_other_in_memory():
  layout = Layout(scanned=True, repeats=8, stages=2, chunks=2)
  assert layout.order == (0, 1, 4, 5, 2, 3, 6, 7)
  location = layout.locate("stack.pattern.0.mlp.up.w")
  assert location is not None and location.layers == layout.order
  for index, layer in enumerate(location.layers):
    assert layout.place(location.template, layer) == ("stack.pattern.0.mlp.up.w", index)


def test_weights_alone_need_not_be_stored():
  def way_back(x, w):
    squared = jnp.einsum("ab->ba", w) @ jnp.ones(len(w))
    return x * 2, squared, jax.jit(lambda a, b: (a + 1, b + 1))(x, w)

  program = jax.make_jaxpr(lambda x: way_back(x, jnp.ones((2, 2))))(jnp.ones(2))
  assert depends_on_inputs(program.jaxpr) == [True, False, True, False]


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    ({"PIPELINE_SCHEDULE": "1f1b", "NUM_VIRTUAL_STAGES": 2}, "has one chunk"),
    ({"PIPELINE_SCHEDULE": "circular"}, "chunks=1"),
    (
      {"PIPELINE_SCHEDULE": "circular", "CIRCULAR_REPEAT": 2, "NUM_MICROBATCHES": 3},
      "microbatches=3 is not a multiple of stages=2",
    ),
    ({"NUM_VIRTUAL_STAGES": 2, "CIRCULAR_REPEAT": 3}, "set one of them"),
    ({"NUM_STAGES": 4}, "NUM_STAGES=4, but"),
    ({"NUM_LAYERS": 1}, "stages=2 x chunks=1 are more than repeats=1 of 1 layers: change the"),
    ({"NUM_MICROBATCHES": 0}, "NUM_MICROBATCHES"),
  ],
)
def test_knobs_that_cannot_be_say_so(knobs, message):
  given = {"ICI_MESH_SHAPE": {"pipeline": 2}, "NUM_LAYERS": 4} | knobs
  with pytest.raises(UserError, match=re.escape(message)):
    fdl.build(registry.find("TinyPython")(**given).trainer())


def test_a_batch_that_stages_cannot_share_says_so():
  built = MeshSpec(ici={"pipeline": 2, "data": 4}).build(jax.devices())
  with pytest.raises(UserError, match=r"16 parts: .* into 4, NUM_MICROBATCHES splits it into 4\. "):
    mesh.check_batch(built, 24, microbatches=4)
