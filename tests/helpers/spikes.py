# SPDX-License-Identifier: Apache-2.0
"""The training of a tiny model in which single steps get wrong targets.

    PYTHONPATH=tests python -m helpers.spikes

prints, for each action of the guard, in how many steps the loss recovers from one such step.
"""

from typing import Any

import jax
import numpy as np

from helpers.tiny_model import adamw, batch, tiny
from paxlike.devices.mesh import MeshSpec
from paxlike.training import optimizers, train_state
from paxlike.training.train_step import make_train_step


def losses(
  action: Any, injected: tuple[int, ...], *, steps: int = 60
) -> tuple[np.ndarray, list[int]]:
  """(the loss of each step on the same batch, spikes found); injected steps have other targets."""
  guard = optimizers.Guard(action=action, deviations=8.0, window=16)
  optimizer = optimizers.guarded(adamw(peak=0.02, eps=1e-8), guard=guard)
  built, definition = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1]), tiny()
  curve, found, clean = [], [], batch(4)
  with jax.set_mesh(built):
    state = train_state.create(definition, optimizer, built, seed=0)
    step = jax.jit(make_train_step(definition, optimizer, seed=0))
    for number in range(steps):
      given = clean
      if number in injected:
        given = clean | {"targets": (clean["targets"] + 1 + number) % 96}
      state, metrics = step(state, given)
      curve.append(float(metrics["loss"][0] / metrics["loss"][1]))
      if float(metrics["spike"][0]):
        found.append(number)
  return np.array(curve), found


def recovery(action: Any, spike: int, *, within: int = 50) -> int:
  """Returns in how many steps the loss is below that before the spike; `within`: in no fewer."""
  curve, found = losses(action, (spike,), steps=spike + within)
  assert spike in found
  (below,) = np.nonzero(curve[spike + 1 :] <= curve[spike - 1])
  return int(below[0]) + 1 if below.size else within


def main():
  spikes = (20, 30, 40, 50)
  print("ON_SPIKE", *(f"step {spike}" for spike in spikes), sep=" | ")
  for action in ("skip", "clip", "report"):
    print(action, *(recovery(action, spike) for spike in spikes), sep=" | ")


if __name__ == "__main__":
  main()
