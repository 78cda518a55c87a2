# SPDX-License-Identifier: Apache-2.0
"""A device whose copy of the state, or whose step, differs from the others is found and named."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from helpers.program import TINY, run
from helpers.tiny_model import adamw, tiny

from paxlike.checkpoints.array_names import flatten
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import RunError
from paxlike.training import loop, replica_check, train_state

pytestmark = pytest.mark.slow


def flipped(x: jax.Array, *, device: int, bit: int) -> jax.Array:
  """Returns an array of which one bit is flipped in the copy on one device."""
  shards = []
  for shard in x.addressable_shards:
    data = np.array(shard.data)
    if shard.device.id == device:
      data.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
    shards.append(jax.device_put(data, shard.device))
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def corrupt(state, name: str, **how):
  """Returns a state of which one array is `flipped`."""
  leaves, treedef = jax.tree.flatten(state)
  index = list(flatten(state)).index(name)
  leaves[index] = flipped(leaves[index], **how)
  return jax.tree.unflatten(treedef, leaves)


def test_every_flipped_bit_is_found_and_its_device_named():
  definition, devices = tiny(weight_dtype="bfloat16"), MeshSpec(ici=(4, 1, 2)).build()
  with jax.set_mesh(devices):
    state = train_state.create(definition, adamw(), devices, seed=0)
    replica_check.check_replicas(state, 7)
    random = np.random.default_rng(0)
    arrays = flatten(state)
    for name in [*random.permutation(list(arrays))[:12], "step"]:
      device = int(random.integers(8))
      held = next(s.data for s in arrays[name].addressable_shards if s.device.id == device)
      wrong = corrupt(state, name, device=device, bit=int(random.integers(8 * held.nbytes)))
      with pytest.raises(RunError) as error:
        replica_check.check_replicas(wrong, 7)
      assert re.findall(r"device (\d) of process 0 in (\S+)\.", str(error.value)) == [
        (str(device), name)
      ]


def test_of_two_copies_both_are_named():
  definition, devices = tiny(), MeshSpec(ici=(2, 4, 1)).build()
  with jax.set_mesh(devices):
    state = train_state.create(definition, adamw(), devices, seed=0)
    name = next(name for name in flatten(state) if "query.w" in name)
    with pytest.raises(RunError, match=r"device 1 of process 0 in .*device 5 of process 0 in "):
      replica_check.check_replicas(corrupt(state, name, device=5, bit=3), 7)


FLAGS = (*TINY, "--fdl.MAX_STEPS=6", "--fdl.CHECKPOINT_EVERY_N_STEPS=2")


def test_a_run_ends_before_it_saves_a_corrupted_state(tmp_path, capsys, monkeypatch):
  """Without a fault, the checks change nothing and find nothing."""
  checks = ("--fdl.CHECK_REPLICAS_EVERY=2", "--fdl.REPEAT_STEP_EVERY=3")
  assert run(*FLAGS, f"--job_log_dir={tmp_path}/plain") == 0
  assert run(*FLAGS, *checks, f"--job_log_dir={tmp_path}/checked") == 0
  losses = [re.findall(r"completed step: .*?loss: \S+", capsys.readouterr().out)]
  assert len(losses[0]) == 12
  of = [re.sub(r"seconds.*?loss", "loss", line) for line in losses[0]]
  assert of[:6] == of[6:]
  step = loop.Loop._step

  def faulty(self, number, state, train_input):
    state, position = step(self, number, state, train_input)
    if number == 3:
      name = next(name for name in flatten(state) if name.endswith("up.w"))
      state = corrupt(state, name, device=6, bit=5)
    return state, position

  monkeypatch.setattr(loop.Loop, "_step", faulty)
  assert run(*FLAGS, *checks, f"--job_log_dir={tmp_path}/run") == 1
  says = "after step 3, copies of the state differ (CHECK_REPLICAS_EVERY): device 6 of process 0"
  assert says in capsys.readouterr().err
  saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
  assert saved == ["checkpoint_00000002"]


def test_a_step_that_is_computed_twice_shows_a_fault(tmp_path, capsys, monkeypatch):
  compiled = loop.Loop._compiled

  def faulty(self, *arguments):
    programs, calls = compiled(self, *arguments), []

    def program(state, batch):
      calls.append(1)
      state, metrics = programs[0, False](state, batch)
      if len(calls) == 5:  # The first call of step 3, as step 1 is computed twice, too.
        params = state.params | {"norm.scale": flipped(state.params["norm.scale"], device=2, bit=9)}
        state = dataclasses.replace(state, params=params)
      return state, metrics

    return {(0, False): program}

  monkeypatch.setattr(loop.Loop, "_compiled", faulty)
  assert run(*FLAGS, "--fdl.REPEAT_STEP_EVERY=2", f"--job_log_dir={tmp_path}/run") == 1
  err = capsys.readouterr().err
  assert "computed twice, with different results (REPEAT_STEP_EVERY): device 2 of process 0" in err
