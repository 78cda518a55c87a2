# SPDX-License-Identifier: Apache-2.0
"""QK-clip: after a step, no head's logits of the same tokens are above the threshold."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from helpers.program import TEXT, run
from helpers.shrunk import shrunk
from helpers.tiny_model import adamw, batch

from paxlike.devices.mesh import MeshSpec
from paxlike.training import optimizers, train_state
from paxlike.training.train_step import make_train_step

pytestmark = pytest.mark.slow
# Family -> query heads of a key head, which share a factor.
FAMILIES = {"Synthetic126M": 1, "SyntheticLLaMA70B": 2, "DeepSeekV3": 1, "DeepSeekV32": 1}
LARGEST = "stack.layers.0.attention.qk_clip.largest"


def steps(
  name: str, threshold: float, *, mesh: dict[str, int], scan: bool = False, microbatches: int = 1
) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]]:
  """(weights, largest logits, the metric) before a step, after it and after the next one.

  Only QK-clip changes weights: the learning rate is 0. The batch is always the same.
  """
  definition = shrunk(name, scan=scan, repeats=2, QK_CLIP=threshold, INIT_STD=0.3)
  vocab = definition.weights["embedding.table"].shape[0]
  tokens = np.random.default_rng(0).integers(0, vocab, (4, 17)).astype(np.int32)
  weights = np.ones((4, 16), np.float32)
  data: Any = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
  optimizer = adamw(peak=0.0)
  built = MeshSpec(ici=mesh).build(jax.devices()[: int(np.prod(list(mesh.values())))])
  with jax.set_mesh(built):
    state = train_state.create(definition, optimizer, built, seed=0)
    made = make_train_step(definition, optimizer, seed=0, num_microbatches=microbatches)
    step, found = jax.jit(made), []
    value = 0.0
    for _ in range(3):
      arrays = jax.tree.map(np.asarray, (state.params, state.extra))
      found.append((*arrays, value))
      state, metrics = step(state, data)
      value = float(metrics["max_attention_logit"][0])
  return found


def test_averages_are_of_the_clipped_weights():
  definition = shrunk("SyntheticLLaMA70B", repeats=2, QK_CLIP=0.05, INIT_STD=0.3)
  optimizer = optimizers.averaged(adamw(), half_lives=(1e-3,))
  built = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  with jax.set_mesh(built):
    state = train_state.create(definition, optimizer, built, seed=0)
    step = jax.jit(make_train_step(definition, optimizer, seed=0))
    state, metrics = step(state, batch(4))
  assert metrics["max_attention_logit"][0] > 0.05
  assert optimizer.evaluated is not None
  for name, w in optimizer.evaluated(state.opt_state, state.params).items():
    np.testing.assert_allclose(w, state.params[name], atol=1e-7, err_msg=name)


@functools.cache
def unbounded(name: str):
  return steps(name, 1e6, mesh={"data": 1})


def threshold_of(name: str) -> float:
  """Half of the first layer's heads are above it."""
  _, extra, _ = unbounded(name)[1]
  return float(np.median(extra[LARGEST]))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_next_step_has_no_larger_logits(name):
  threshold = threshold_of(name)
  before, first, second = steps(name, threshold, mesh={"data": 1})
  assert not before[1][LARGEST].any()
  was, now = first[1][LARGEST], second[1][LARGEST]
  np.testing.assert_array_equal(was, unbounded(name)[1][1][LARGEST])
  assert (was > threshold).any()
  groups = was.reshape(-1, FAMILIES[name])
  factors = np.minimum(1, threshold / groups.max(1, keepdims=True))
  np.testing.assert_allclose(now, (groups * factors).reshape(-1), rtol=1e-4)
  assert now.max() <= threshold * (1 + 1e-4)
  assert first[2] == max(x.max() for x in first[1].values())
  changed = {key for key in before[0] if not np.array_equal(before[0][key], first[0][key])}
  kinds = {key.split("attention.")[-1] for key in changed if "router_bias" not in key}
  key = "key_value.w" if name.startswith("DeepSeek") else "key.w"
  assert kinds - {"query.b", "key.b"} == {"query.w", key}


@pytest.mark.parametrize(
  ("name", "how"),
  [
    ("DeepSeekV3", {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "scan": True}),
    ("SyntheticLLaMA70B", {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "scan": True}),
    ("SyntheticLLaMA70B", {"mesh": {"data": 1}, "microbatches": 2}),
  ],
  ids=["latent on a mesh", "grouped on a mesh", "microbatches"],
)
def test_it_is_the_same_on_a_mesh_and_in_microbatches(name, how):
  threshold = threshold_of(name)
  expected = steps(name, threshold, mesh={"data": 1}, scan=how.get("scan", False))
  for (got, _, _), (params, _, _) in zip(steps(name, threshold, **how), expected, strict=True):
    for key, value in params.items():
      np.testing.assert_allclose(got[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--fdl.QK_NORM=true"], "QK_CLIP: this model normalizes queries and keys"),
    (["--fdl.OPTIMIZER=schedule_free_adamw"], "QK_CLIP: schedule_free_adamw keeps weights of its"),
    (["--fdl.USE_LORA=true"], "QK-clip scales stack.pattern.0.attention.query.w, which is frozen"),
  ],
)
def test_it_is_refused_where_it_has_no_effect(tmp_path, text, capsys, flags, says):
  given = (f"--fdl.DATA_PATH={text}", f"--job_log_dir={tmp_path}/run", "--fdl.MAX_STEPS=8")
  assert run(*TEXT, *given, "--fdl.QK_CLIP=30", *flags) == 2
  assert capsys.readouterr().err.startswith(f"paxlike: {says}")
