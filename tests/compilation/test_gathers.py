# SPDX-License-Identifier: Apache-2.0
"""What steps under fsdp exchange: each weight once a pass, each gradient once."""

import math
from typing import Any

import fiddle as fdl
import jax
import pytest
from helpers import hlo

from paxlike import registry, run_mode
from paxlike.compilation import aot, hlo_collectives
from paxlike.devices import topology, xla_flags
from paxlike.training import evaluation

DEVICES = 8
SIZES = {
  "NUM_LAYERS": 2,
  "MODEL_DIMS": 512,
  "HIDDEN_DIMS": 1408,
  "NUM_HEADS": 4,
  "VOCAB_SIZE": 4096,
  "MAX_SEQ_LEN": 256,
  "PERCORE_BATCH_SIZE": 1,
  "ICI_MESH_SHAPE": (1, DEVICES, 1),
  "CHECKPOINT_POLICY": "SAVE_NOTHING",
}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("target", "knobs"),
  [
    ("h100-8", {"USE_REPEATED_LAYER": False}),
    ("h100-8", {"USE_REPEATED_LAYER": True, "USE_LORA": True, "LORA_RANK": 8}),
    ("h100-8", {"USE_REPEATED_LAYER": True, "GRADIENT_ACCUMULATION_STEPS": 2}),
    ("v5e-8", {"USE_REPEATED_LAYER": True}),
  ],
  ids=str,
)
def test_weights_are_gathered_once_a_pass_and_gradients_scattered_once(target, knobs):
  parts = knobs.get("GRADIENT_ACCUMULATION_STEPS", 1)
  sizes = SIZES | {"PERCORE_BATCH_SIZE": parts}
  with topology.target(target):
    graph = registry.find("SyntheticLLaMA7B")(**sizes, **knobs).trainer()
    trainer = run_mode.build_trainer(graph)
    program = aot.compile_step(trainer)
  # In bfloat16; of the embedding the tokens' vectors are exchanged, not the table. What is smaller
  # than a matrix is less than the tolerance.
  weights = {n: w for n, w in trainer.definition.weights.items() if not n.startswith("embedding")}
  sharded = {name: weight for name, weight in weights.items() if "model" in weight.dims}
  nbytes = {name: 2 * math.prod(weight.shape) for name, weight in sharded.items()}
  head = nbytes["head.w"]
  blocks = sum(nbytes.values()) - head
  scattered = sum(nbytes[name] for name, weight in sharded.items() if weight.trained)
  found = dict.fromkeys(("all-gather", "reduce-scatter", "collective-permute"), 0.0)
  found |= {one.kind: one.nbytes for one in program.collectives()}
  sent = 1 - 1 / DEVICES
  # The head does not depend on the part of the batch, and XLA gathers it before the loop over them.
  assert found["all-gather"] == pytest.approx(sent * (2 * parts * blocks + head), rel=0.02)
  assert found["reduce-scatter"] == pytest.approx(sent * parts * scattered, rel=0.02)
  assert found["collective-permute"] == 0


@pytest.mark.slow
def test_a_v5e_sums_gradients_beside_matmuls():
  with topology.target("v5e-256"):
    graph = registry.find("Scaled16BV5e256")(NUM_LAYERS=2, VOCAB_SIZE=2048).trainer()
    program = aot.compile_step(run_mode.build_trainer(graph))
  found = {one.kind: one for one in program.overlap() if one.in_loop}
  sums = found["all-reduce"]
  # Without `gradient_order.after_weights`, a quarter of the bytes is sent while a chip waits.
  assert sums.synchronous_nbytes < 0.1 * sums.asynchronous_nbytes


@pytest.mark.slow
def test_evaluation_gathers_each_weight_once():
  with topology.target("h100-8"):
    trainer: Any = fdl.build(registry.find("SyntheticLLaMA7B")(**SIZES).trainer())
    options, _ = xla_flags.options()
    definition, devices = trainer.definition, trainer.devices
    with jax.set_mesh(devices):
      state, batch = trainer.abstract()
      measure = jax.jit(lambda p, b: evaluation.scores_of(definition, definition.prepare(p), b))
      text = hlo.text(measure, state.params, batch, options=options)
  sharded = [w for n, w in definition.weights.items() if "model" in w.dims and n[:5] != "embed"]
  nbytes = 2 * sum(math.prod(weight.shape) for weight in sharded)
  found = {one.kind: one.nbytes for one in hlo_collectives.collectives(text, devices)}
  assert found["all-gather"] == pytest.approx((1 - 1 / DEVICES) * nbytes, rel=0.02)
