# SPDX-License-Identifier: Apache-2.0
"""Few calls lie between the step and the matmul of a linear layer, so that it can be read."""

import traceback

import jax
import pytest
from helpers.sources import PACKAGE
from helpers.tiny_model import adamw, batch, tiny

from paxlike.devices.mesh import MeshSpec
from paxlike.layers import linear
from paxlike.training import train_state
from paxlike.training.train_step import make_train_step

MOST = 12  # From `train_step` to `matmul`, both counted; `Attention.project` is one of them.


@pytest.mark.parametrize("scan", [False, True])
def test_the_matmul_of_a_linear_layer_is_near_the_step(scan, monkeypatch):
  depths, matmul = [], linear.matmul

  def recorded(*args):
    own = [f.name for f in traceback.extract_stack() if f.filename.startswith(f"{PACKAGE}/")]
    depths.append(len(own) - own.index("train_step") + 1)
    return matmul(*args)

  monkeypatch.setattr(linear, "matmul", recorded)
  definition, optimizer = tiny(scan=scan), adamw()
  devices = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  state = train_state.abstract(definition, optimizer, devices)
  with jax.set_mesh(devices):
    jax.eval_shape(make_train_step(definition, optimizer, seed=0), state, batch())
  assert depths and max(depths) == MOST
