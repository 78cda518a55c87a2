# SPDX-License-Identifier: Apache-2.0
"""Makes checkpoints with Pax itself: `python make.py FOLDER [NAME...]`.

It runs where paxml and praxis are importable: 1.4.0 on Python 3.10 with jaxlib 0.4.26, and of their
repositories at b397693f and feeaff19 `paxml/contrib`, `praxis/contrib` and `praxis/layers/glam.py`,
which the release lacks or has in an older form. VOCAB_PATH names any SentencePiece model.

Models are those of Pax's GPU recipes at tiny sizes, random in all weights; paxml's checkpointer
writes them. Each archive holds `checkpoints` and `logits.npz`: tokens, and the logits that Pax
computes for them.
"""
# pyright: reportMissingImports=false

import pathlib
import shutil
import sys
import tarfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from paxml import checkpoints, train_states
from paxml.contrib.gpu.scripts_gpu import configs
from praxis import base_layer, py_utils

SIZES: dict[str, Any] = {
  "VOCAB_SIZE": 64,
  "MAX_SEQ_LEN": 32,
  "NUM_LAYERS": 4,
  "NUM_HEADS": 4,
  "MODEL_DIMS": 16,
  "HIDDEN_DIMS": 24,
  "DIMS_PER_HEAD": 4,
  "ICI_MESH_SHAPE": [1, 1, 1],
  "DCN_MESH_SHAPE": [1, 1, 1],
  "FPROP_DTYPE": jnp.float32,
}
_GLAM = {"NUM_EXPERTS": 4, "NUM_GPUS": 1, "MODEL_DIMS": 32, "DIMS_PER_HEAD": 8}
# Name -> (Pax's experiment, what differs from SIZES, whether the checkpoint is one database).
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
  "gpt": ("GPT126MBase", {}, False),
  "gpt_repeated": ("GPT126MBase", {"USE_REPEATED_LAYER": True}, False),
  "gpt_database": ("GPT126MBase", {"USE_REPEATED_LAYER": True}, True),
  "llama": ("BaseLLaMA", {}, False),
  "llama_repeated": ("BaseLLaMA", {"USE_REPEATED_LAYER": True}, False),
  "llama_grouped": ("BaseLLaMA", {"USE_MQA": True, "NUM_KV_HEADS": 2}, False),
  "llama_one_kv_head": ("BaseLLaMA", {"USE_MQA": True, "NUM_KV_HEADS": 1}, False),
  "glam": ("GLaM126M64EBase", _GLAM, False),
  "glam_repeated": ("GLaM126M64EBase", {**_GLAM, "USE_REPEATED_LAYER": True}, False),
}


def batch() -> py_utils.NestedMap:
  shape = (2, SIZES["MAX_SEQ_LEN"])
  ids = np.random.default_rng(0).integers(2, SIZES["VOCAB_SIZE"], shape).astype(np.int32)
  positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
  return py_utils.NestedMap(
    ids=ids,
    labels=ids,
    paddings=np.zeros(shape, np.float32),
    weights=np.ones(shape, np.float32),
    segment_ids=np.ones(shape, np.int32),
    segment_pos=positions,
    eval_sample_weights=np.ones(shape[:1], np.float32),
  )


def make(name: str, folder: pathlib.Path):
  """Makes one checkpoint and packs it."""
  base, options, is_database = RUNS[name]
  family = getattr(configs, base)
  own = {"datasets": lambda self: []}  # Abstract in Pax.
  experiment = type(name, (family,), {**own, **SIZES, **options})()
  task = experiment.task()
  if "NUM_EXPERTS" in options:
    stack = task.model.lm_tpl.stacked_transformer_tpl
    # Room for all tokens, so that none is dropped.
    getattr(stack, "block", stack).moe_layer_tpl.unadjusted_expert_capacity_factor = 8.0
  with jax.default_matmul_precision("float32"):
    model = base_layer.instantiate(task.model)
    given = batch()
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
      weights = model.init(jax.random.PRNGKey(0), given)
      weights = jax.tree_util.tree_map(np.asarray, weights)
      random = np.random.default_rng(1)
      weights = jax.tree_util.tree_map(
        lambda w: (w + 0.1 * random.standard_normal(w.shape)).astype(np.float32), weights
      )
      predictions = model.apply(weights, given, method=model.compute_predictions)
  run = folder / name
  shutil.rmtree(run, ignore_errors=True)
  weights = jax.tree_util.tree_map(jnp.asarray, weights)
  state = train_states.TrainState(step=jnp.asarray(2), mdl_vars=weights, opt_states=[])
  checkpoints.save_checkpoint(
    state,
    str(run / "checkpoints"),
    checkpoint_type=checkpoints.CheckpointType.GDA,
    tensorstore_use_ocdbt=is_database,
  )
  np.savez(run / "logits.npz", tokens=given.ids, logits=np.asarray(predictions.logits))
  with tarfile.open(folder / f"{name}.tar.xz", "w:xz") as archive:
    archive.add(run, arcname=name)
  print(name, (folder / f"{name}.tar.xz").stat().st_size, flush=True)


if __name__ == "__main__":
  for one in sys.argv[2:] or RUNS:
    make(one, pathlib.Path(sys.argv[1]).absolute())
