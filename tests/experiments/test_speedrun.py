# SPDX-License-Identifier: Apache-2.0
"""The speedrun's model is that of its published script, and it trains on its files."""

from typing import Any

import fiddle as fdl
import numpy as np
import pytest
import torch
from helpers.program import curve, run
from torch.nn import functional as F

from paxlike.data.token_shards import TokenShards
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.experiments.speedrun import Speedrun
from paxlike.layers.decoder import forward
from paxlike.training.train_state import init_params

T, V, D, N, H = 12, 64, 32, 2, 16
SIZES = {"VOCAB_SIZE": V, "MODEL_DIMS": D, "NUM_HEADS": N, "DIMS_PER_HEAD": H, "NUM_LAYERS": 2}
SIZES |= {"MAX_SEQ_LEN": T}


def reference(weights, tokens_BT):
  """The model, in PyTorch."""
  w = {name: torch.tensor(np.asarray(x)) for name, x in weights.items()}

  def norm(x, name=None):
    y = F.rms_norm(x, (x.shape[-1],), eps=1e-6)
    return y if name is None else y * w[f"{name}.scale"]

  def linear(x, name):
    matrix = w[f"{name}.w"]
    inputs = matrix.shape[:-1] if name.endswith("output") else matrix.shape[:1]
    y = x.flatten(x.ndim - len(inputs)) @ matrix.reshape(int(np.prod(inputs)), -1)
    return y + w[f"{name}.b"].flatten()

  def rotate(x_BTNH):
    angles = torch.outer(torch.arange(T), (1 / 1024) ** torch.linspace(0, 1, H // 4))
    theta = torch.cat([angles, torch.zeros(T, H // 4)], -1)[:, None]
    a, b = x_BTNH.chunk(2, -1)
    cos, sin = theta.cos(), theta.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)  # There: by -theta.

  x = norm(w["embedding.table"][torch.tensor(tokens_BT)], "embedding_norm")
  for layer in range(2):
    at = f"stack.layers.{layer}"
    y = norm(x, f"{at}.attention_norm")
    roles = ("query", "key", "value")
    q, k, v = (linear(y, f"{at}.attention.{role}").unflatten(-1, (N, H)) for role in roles)
    q, k = rotate(norm(q)), rotate(norm(k))
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, scale=0.12, is_causal=True).transpose(1, 2)
    x = x + linear(y, f"{at}.attention.output")
    y = linear(norm(x, f"{at}.mlp_norm"), f"{at}.mlp.up").relu().square()
    x = x + linear(y, f"{at}.mlp.down")
  return 15 * torch.tanh(linear(norm(x, "norm"), "head") / 15)


@pytest.mark.slow
def test_the_model_is_the_published_one():
  given = {"DATA_PATH": "x", "FPROP_DTYPE": "float32", "USE_REPEATED_LAYER": False}
  trainer = fdl.build(Speedrun(**SIZES, **given).trainer())
  devices = MeshSpec(ici=(1, 1, 1)).build([trainer.devices.devices.flat[0]])
  weights = init_params(trainer.definition, devices, seed=0)
  random = np.random.default_rng(0)
  weights: Any = {  # Also those that begin with zeros.
    name: np.asarray(w) + 0.1 * random.normal(size=w.shape).astype(np.float32)
    for name, w in weights.items()
  }
  tokens: Any = random.integers(0, V, (3, T)).astype(np.int32)
  got, _ = forward(trainer.definition, weights, {"inputs": tokens})
  np.testing.assert_allclose(got, reference(weights, tokens), rtol=2e-4, atol=2e-4)


def test_a_scale_of_normalized_embeddings_is_refused():
  with pytest.raises(UserError, match="EMBEDDING_SCALE: this model normalizes"):
    Speedrun(DATA_PATH="x", EMBEDDING_SCALE=12.0).trainer()


def write(path, tokens, *, claimed=None, magic=20240520):
  header = np.zeros(256, np.int32)
  header[:3] = magic, 1, len(tokens) if claimed is None else claimed
  path.write_bytes(header.tobytes() + np.asarray(tokens, np.uint16).tobytes())


@pytest.fixture
def shards(tmp_path):
  folder = tmp_path / "tokens"
  folder.mkdir()
  for number, size in enumerate((50, 37)):
    write(folder / f"fineweb_train_{number:06d}.bin", (np.arange(size) + 50 * number) % V)
  write(folder / "fineweb_val_000000.bin", np.arange(300) % V)
  return folder


def opened(folder, prefix="fineweb_train_"):
  return TokenShards(path=str(folder), prefix=prefix, seq_len=T, vocab_size=V)


def test_sequences_are_the_tokens_of_the_files_in_order(shards):
  data = opened(shards)
  assert data.num_rows(0) == 4 + 3
  rows = data.rows(0, np.arange(7))
  firsts = np.array([0, 12, 24, 36, 50, 62, 74])
  np.testing.assert_array_equal(rows["inputs"], (firsts[:, None] + np.arange(T)) % V)
  np.testing.assert_array_equal(rows["targets"], (firsts[:, None] + np.arange(1, T + 1)) % V)


@pytest.mark.parametrize(
  ("damage", "says"),
  [
    ({"claimed": 60}, r"000000\.bin is cut off: 50 of 60 tokens"),
    ({"magic": 1}, r"000000\.bin is not a file of token ids as llm\.c writes"),
  ],
)
def test_other_files_are_refused(shards, damage, says):
  write(shards / "fineweb_train_000000.bin", np.arange(50), **damage)
  with pytest.raises(UserError, match=says):
    opened(shards).check()
  with pytest.raises(UserError, match=r"has no file other\*\.bin"):
    opened(shards, "other").check()


@pytest.mark.slow
def test_it_trains_on_the_files(shards, tmp_path):
  flags = [f"--fdl.{name}={value}" for name, value in SIZES.items()]
  more = ("--fdl.PERCORE_BATCH_SIZE=1", "--fdl.MAX_STEPS=30", "--fdl.SUMMARY_INTERVAL_STEPS=1")
  more = (*more, "--fdl.eval_data[fineweb].num_batches=2", "--fdl.FPROP_DTYPE=float32")
  folder = tmp_path / "run"
  where = (f"--fdl.DATA_PATH={shards}", f"--job_log_dir={folder}")
  assert run("--fdl_config=Speedrun", *flags, *more, *where) == 0
  losses = [loss for _, loss in curve(folder)]
  assert losses[0] == pytest.approx(np.log(V), rel=1e-3) and losses[-1] < losses[0] - 1
