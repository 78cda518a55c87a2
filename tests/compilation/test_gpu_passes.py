# SPDX-License-Identifier: Apache-2.0
"""How often a program for an H200 reads and writes its large arrays; it is compiled, not run."""

import re

import pytest
from helpers import hlo

from paxlike import registry, run_mode
from paxlike.compilation import aot
from paxlike.devices import topology

pytestmark = pytest.mark.slow
TOKENS, WIDTH, VOCABULARY = 32 * 2048, 768, 50304
ACTIVATIONS, LOGITS = 2 * TOKENS * WIDTH, 2 * TOKENS * VOCABULARY  # Bytes in bfloat16.


def compiled(**knobs):
  experiment = registry.find("Synthetic126M")(
    NUM_LAYERS=1,
    PERCORE_BATCH_SIZE=32,
    CHECKPOINT_POLICY="SAVE_EVERYTHING",
    USE_REPEATED_LAYER=False,
    **knobs,
  )
  return aot.compile_step(run_mode.build_trainer(experiment.trainer()))


@pytest.fixture(scope="module")
def program():
  with topology.target("h200-1"):
    yield compiled()


def attention_products(program, scope):
  """The role and the instruction of each matmul of attention's maps."""
  pattern = re.escape(f"/{scope}/attention/") + "(query|key|value|output)/"
  calls = hlo.custom_calls(program.text, "__cublas")
  return [(match[1], one) for one in calls if (match := re.search(pattern, one.op_name))]


def test_cublas_adds_the_biases_of_heads(program):
  forward = attention_products(program, "jvp(layer_0)")
  assert sorted(role for role, _ in forward) == ["key", "output", "query", "value"]
  assert all('"epilogue":"BIAS"' in one.attributes for _, one in forward)


def test_in_fp8_cublas_adds_biases_too_but_computes_no_gelu(h200):
  calls = hlo.custom_calls(compiled(USE_FP8=True).text, "__cublas$lt$matmul$f8")
  forward = [one for one in calls if "/jvp(layer_0)/" in one.op_name]
  found = [re.findall(r'"epilogue":"(\w+)"', one.attributes) for one in forward]
  assert found == [["BIAS"]] * 6


def test_cublas_adds_up_the_gradients_that_queries_keys_and_values_give_their_input(program):
  backward = attention_products(program, "transpose(jvp(layer_0))")
  to_inputs = [one for _, one in backward if one.outputs[0].nbytes == ACTIVATIONS]
  added = [one for one in to_inputs if '"beta":1' in one.attributes]
  assert (len(to_inputs), len(added)) == (4, 2)  # Nothing is added to that of the output.


def test_no_layer_writes_activations_in_float32(program):
  written = [
    shape
    for one in hlo.instructions(program.text)
    if "layer_0" in one.op_name and one.operation == "fusion"
    for shape in one.outputs
    if shape.nbytes >= ACTIVATIONS
  ]
  assert {shape.dtype for shape in written} == {"bf16"}


def test_a_cross_entropy_reads_the_logits_once(program):
  reduced = [
    one
    for one in program.kernels()
    if one.group == "memory" and "jvp(head)" in one.source and "reduce" in one.kind
  ]
  read = sum(one.count * one.nbytes for one in reduced)
  assert LOGITS < read < 1.1 * LOGITS
