# SPDX-License-Identifier: Apache-2.0
"""Makes checkpoints with MaxText itself: `python make.py FOLDER [NAME...]`.

It runs where `maxtext` 0.2.5 and `jax` for CPUs are installed (Python 3.12). Each archive holds the
folder of a run that MaxText's own program trained for two steps, with its last checkpoint (or what
its program for parameters alone made of it), and `logits.npz`: tokens, and the logits that MaxText
computes for them with the weights it restored.
"""
# pyright: reportMissingImports=false

import pathlib
import shutil
import sys
import tarfile
from typing import Any

import numpy as np

COMMON: dict[str, Any] = {
  "vocab_size": 64,
  "base_emb_dim": 16,
  "base_mlp_dim": 24,
  "base_num_decoder_layers": 3,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 8,
  "max_target_length": 32,
  "per_device_batch_size": 1,
  "steps": 2,
  "learning_rate": 0.02,
  "warmup_steps_fraction": 0.0,
  "dtype": "float32",
  "weight_dtype": "float32",
  "matmul_precision": "highest",
  "attention": "dot_product",
  "dataset_type": "synthetic",
  "hardware": "cpu",
  "skip_jax_distributed_system": "true",
  "enable_checkpointing": "true",
  "async_checkpointing": "false",
  "enable_goodput_recording": "false",
  "override_model_config": "true",
  "enable_dropout": "false",
}
# With tied embeddings MaxText rounds the table to bfloat16, so weights are stored in it.
_TIED = {"weight_dtype": "bfloat16"}
_GEMMA = {**_TIED, "mlp_activations": '["gelu","linear"]', "logits_via_embedding": "true"}
# Name -> keys that differ from COMMON.
RUNS: dict[str, dict[str, Any]] = {
  "llama2": {"decoder_block": "llama2"},
  "llama2_unscanned": {"decoder_block": "llama2", "scan_layers": "false"},
  "llama2_fused": {"decoder_block": "llama2", "fused_mlp": "true"},
  "llama31": {"decoder_block": "llama2", "rope_type": "llama3.1", "rope_max_timescale": 500_000},
  "mistral": {"decoder_block": "mistral", "rope_max_timescale": 1_000_000},
  "mixtral": {
    "decoder_block": "mixtral",
    "base_num_decoder_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 24,
    "megablox": "false",
    "sparse_matmul": "false",
  },
  "gemma": {**_GEMMA, "decoder_block": "gemma", "base_num_kv_heads": 1},
  "gemma2": {
    **_GEMMA,
    "decoder_block": "gemma2",
    "base_num_decoder_layers": 2,
    "sliding_window_size": 6,
    "attn_logits_soft_cap": 50.0,
    "final_logits_soft_cap": 30.0,
    "use_post_attn_norm": "true",
    "use_post_ffw_norm": "true",
  },
  "gemma3": {
    **_TIED,
    "model_name": "gemma3-4b",
    "use_multimodal": "false",
    "base_num_decoder_layers": 8,
    "sliding_window_size": 6,
  },
  "gpt3": {
    **_TIED,
    "model_name": "gpt3-52k",
    "base_num_decoder_layers": 2,
    "base_num_kv_heads": 4,
    "trainable_position_size": 32,
  },
}
RUNS["gemma3_unscanned"] = {**RUNS["gemma3"], "scan_layers": "false"}
RUNS["gemma2_unscanned"] = {**RUNS["gemma2"], "scan_layers": "false"}
RUNS["mixtral_unscanned"] = {**RUNS["mixtral"], "scan_layers": "false"}


# Parameters alone, in bfloat16, with the layers unrolled.
RUNS["llama2_parameters"] = {**RUNS["llama2"], "force_unroll": "true"}


def flags(name: str, folder: pathlib.Path) -> list[str]:
  """MaxText's command line of a run, without its program."""
  keys = {**COMMON, **RUNS[name], "run_name": name, "base_output_directory": folder}
  import maxtext

  base = pathlib.Path(str(maxtext.__file__)).parent / "configs" / "base.yml"
  return [str(base), *(f"{key}={value}" for key, value in keys.items())]


def save_logits(name: str, folder: pathlib.Path):
  """Restores the weights of a run as MaxText does, and saves logits."""
  import jax
  from maxtext.common.common_types import DECODING_ACTIVE_SEQUENCE_INDICATOR, MODEL_MODE_TRAIN
  from maxtext.configs import pyconfig
  from maxtext.utils import maxtext_utils, model_creation_utils

  (items,) = (folder / name / "checkpoints").glob("*/items")
  given = [*flags(name, folder / "again"), f"load_parameters_path={items}"]
  if name == "llama2_parameters":
    given.append("scan_layers=false")
  config = pyconfig.initialize(["make.py", *given])
  mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
  model = model_creation_utils.from_pretrained(config, mesh=mesh, model_mode=MODEL_MODE_TRAIN)
  shape = (config.global_batch_size_to_train_on, config.max_target_length)
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
  with jax.set_mesh(mesh):
    logits = model(
      decoder_input_tokens=tokens,
      decoder_positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
      decoder_segment_ids=np.full(shape, DECODING_ACTIVE_SEQUENCE_INDICATOR, np.int32),
      enable_dropout=False,
    )
  np.savez(folder / name / "logits.npz", tokens=tokens, logits=np.asarray(logits, np.float32))


def make(name: str, folder: pathlib.Path):
  """Makes one run and packs it."""
  shutil.rmtree(folder / name, ignore_errors=True)
  from maxtext.trainers.pre_train import train
  from maxtext.utils import generate_param_only_checkpoint

  if name == "llama2_parameters":
    make("llama2", folder)
    state = folder / "llama2" / "checkpoints" / "1" / "items"
    given = [*flags(name, folder), f"load_full_state_path={state}"]
    generate_param_only_checkpoint.main(["generate.py", *given])
  else:
    train.main(["train.py", *flags(name, folder)])
    shutil.rmtree(folder / name / "checkpoints" / "0")
  save_logits(name, folder)
  with tarfile.open(folder / f"{name}.tar.xz", "w:xz") as archive:
    for kept in ("logits.npz", "checkpoints"):
      archive.add(folder / name / kept, arcname=f"{name}/{kept}")
  print(name, (folder / f"{name}.tar.xz").stat().st_size, flush=True)


if __name__ == "__main__":
  for one in sys.argv[2:] or RUNS:
    make(one, pathlib.Path(sys.argv[1]).absolute())
