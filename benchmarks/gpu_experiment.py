# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/gpu.py has to know of experiments and of the device, as a process of its own.

Whoever asks must not touch the device that the cases need to themselves: this process leaves it
when it ends. It reads {name: {"experiment": ..., "flags": {KNOB: value}}} as JSON and prints JSON.
"""

import json
import sys
from typing import TYPE_CHECKING, Any

import experiments

if TYPE_CHECKING:
  from paxlike.experiment import Experiment
  from paxlike.training.trainer import Trainer


def arguments(knobs: dict[str, Any]) -> list[str]:
  """Returns the flags that set knobs."""
  return [f"--fdl.{knob}={value}" for knob, value in knobs.items()]


def facts(name: str, knobs: dict[str, Any]) -> dict[str, Any]:
  """Returns sizes, optimizer and FLOPs of an experiment, as a peer needs them."""
  return facts_of(*experiments.build(name, arguments(knobs)))


def facts_of(experiment: "Experiment", trainer: "Trainer") -> dict[str, Any]:
  """Returns the same of an experiment that is built."""
  from paxlike.layers import flops

  read: Any = experiment
  per_token = flops.per_token(trainer.definition, read.MAX_SEQ_LEN)
  hidden = read.HIDDEN_DIMS
  return {
    "layers": read.NUM_LAYERS,
    "model": read.MODEL_DIMS,
    "heads": read.NUM_HEADS,
    "kv_heads": getattr(read, "NUM_KV_HEADS", None) or read.NUM_HEADS,
    "head": read.head_dim(),
    "ffn": 4 * read.MODEL_DIMS if hidden is None else hidden,
    "experts": getattr(read, "NUM_EXPERTS", 0),
    "experts_per_token": getattr(read, "NUM_EXPERTS_PER_TOKEN", 0),
    "vocab": read.VOCAB_SIZE,
    "time": read.MAX_SEQ_LEN,
    "init_std": read.INIT_STD,
    "norm_epsilon": getattr(read, "NORM_EPSILON", 1e-5),
    "rope_theta": getattr(read, "ROPE_THETA", None),
    "lora_rank": read.LORA_RANK if read.USE_LORA else 0,
    "fp8": read.USE_FP8,
    "weight_dtype": read.WEIGHT_DTYPE,
    "moment_dtype": read.ADAM_MOMENT_DTYPE,
    "learning_rate": read.LEARNING_RATE,
    "betas": [read.ADAM_BETA1, read.ADAM_BETA2],
    "epsilon": read.ADAM_EPSILON,
    "weight_decay": read.WEIGHT_DECAY,
    "clip_norm": read.CLIP_GRADIENT_NORM_TO_VALUE,
    "parameters": trainer.definition.num_params,
    "trained": trainer.definition.num_trained,
    "flops_causal": per_token.causal,
    "flops_full": per_token.full,
  }


def tell():
  """Answers what is asked on standard input."""
  asked = json.load(sys.stdin)
  models = {name: facts(one["experiment"], one["flags"]) for name, one in asked.items()}
  import jax

  from paxlike.devices import chips

  device = jax.devices()[0]
  chip = chips.find(device.device_kind)
  answer = {
    "platform": device.platform,
    "device": device.device_kind,
    "flops": chip.flops if chip else None,
    "models": models,
  }
  print(json.dumps(answer))


if __name__ == "__main__":
  tell()
