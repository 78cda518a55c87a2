# SPDX-License-Identifier: Apache-2.0
"""What Pallas for Triton means by loads and stores that are masked.

Callee: jax/_src/pallas/triton/ and pallas/primitives.py, JAX 0.10.2 and 0.12.0.
- `triton.load(ref, mask=, other=)`: where the mask is False nothing is read and the value is
  `other`; without `other` it is *undefined*. `triton.store(mask=)` writes nothing there.
- Interpret mode is more forgiving: an index beyond the array is clamped, so a load without a mask
  succeeds there and reads foreign memory on a GPU; whether there is a mask is asked of the jaxpr
  here.
- Dims of values are powers of two on a GPU; interpret mode takes any.
- `CompilerParams(num_warps, num_stages)`: of another backend's they would be ignored. Warps are a
  power of two.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from helpers.jaxprs import equations
from jax.experimental.pallas import triton

from paxlike.layers.moe import grouped_matmul_triton


def traced(transposed):
  """Returns the equations of a kernel, and of those that call it."""
  x = jnp.ones((300, 70), jnp.bfloat16)
  sizes = jnp.array([100, 50, 130], jnp.int32)
  if transposed:
    function, second = grouped_matmul_triton.multiply_transposed, jnp.ones((300, 90), x.dtype)
  else:
    function, second = grouped_matmul_triton.multiply, jnp.ones((3, 70, 90), x.dtype)
  program = jax.make_jaxpr(lambda: function(x, second, sizes, x.dtype))()
  return [equation for equation, _ in equations(program.jaxpr)]


@pytest.mark.parametrize("transposed", [False, True])
def test_every_load_of_rows_is_masked_and_says_what_is_there_instead(transposed):
  found = {"masked_load": 0, "masked_swap": 0}
  for equation in traced(transposed):
    name = equation.primitive.name
    if name not in found:
      continue
    found[name] += 1
    _, _, *rest = equation.params["args_tree"].unflatten(equation.invars)
    if name == "masked_load":
      mask, other = rest
      assert mask is not None and other is not None
    else:
      assert rest[-1] is not None
    shape = rest[0].aval.shape if name == "masked_load" else rest[-1].aval.shape
    assert all(math.log2(size).is_integer() for size in shape)
  assert found == {"masked_load": 2, "masked_swap": 1}


@pytest.mark.parametrize("transposed", [False, True])
def test_what_a_kernel_is_compiled_with(transposed):
  (call,) = (e for e in traced(transposed) if e.primitive.name == "pallas_call")
  given = call.params["compiler_params"]
  assert isinstance(given, triton.CompilerParams) and not call.params["interpret"]
  assert given.num_warps == 8 and given.num_stages == 3
