# SPDX-License-Identifier: Apache-2.0
import jax
import pytest
from jax.sharding import AxisType, Mesh


@pytest.fixture
def mesh() -> Mesh:
  return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
