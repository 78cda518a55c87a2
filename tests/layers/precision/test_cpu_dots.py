# SPDX-License-Identifier: Apache-2.0
"""XLA for CPUs multiplies in bfloat16: it converts no operand of a matmul to float32."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import hlo

from paxlike.layers import flash_cpu
from paxlike.layers.moe.grouped_matmul import GroupedForm, grouped_matmul
from paxlike.layers.precision.matmul import matmul


def experts(x_MD, w_EDF):
  return grouped_matmul(x_MD, w_EDF, GroupedForm(jnp.array([8, 24], jnp.int32)))


@pytest.mark.parametrize(
  "function, shapes",
  [
    (matmul, [(32, 16), (16, 64)]),
    (matmul, [(32, 64), (64, 16)]),
    (experts, [(32, 16), (2, 16, 64)]),
    (functools.partial(flash_cpu, scale=0.3, segments_BT=None), [(2, 128, 4, 16)] * 3),
  ],
)
def test_no_operand_of_a_matmul_and_its_gradients_is_converted(function, shapes):
  def outputs(*arrays):
    y, back = jax.vjp(function, *arrays)
    return y, back(y)

  arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  program = hlo.text(outputs, *arrays)
  found = {one.name: one for one in hlo.instructions(program)}
  dots = [one for one in found.values() if one.operation == "dot"]
  assert len(dots) >= 3
  for dot in dots:
    for operand in dot.operands:
      assert {shape.dtype for shape in found[operand].outputs} == {"bf16"}, (dot, operand)
