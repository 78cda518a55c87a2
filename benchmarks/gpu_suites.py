# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/gpu.py measures: models, their sizes, and who is compared with whom."""

import dataclasses
from typing import Any, Literal

Side = Literal["gpu_roofline", "gpu_ours", "torch_gpt", "torch_llama"]
Flags = dict[str, Any]

# One rate for both sides: no schedule is a part of the comparison.
_ALL: Flags = {"LR_SCHEDULE": "constant", "LEARNING_RATE": 1e-5}
# What is fastest on one device; the published recipes are for many.
_SINGLE: Flags = {"USE_REPEATED_LAYER": False, "CHECKPOINT_POLICY": "SAVE_EVERYTHING"}
_LORA: Flags = {"USE_LORA": True, "LORA_RANK": 32}
_TINY: Flags = {
  "NUM_LAYERS": 2,
  "MODEL_DIMS": 64,
  "HIDDEN_DIMS": 128,
  "NUM_HEADS": 2,
  "DIMS_PER_HEAD": 32,
  "VOCAB_SIZE": 512,
  "MAX_SEQ_LEN": 64,
}
# torch_gpt has no dropout.
_GPT_5B: Flags = {"EMBEDDING_DROPOUT_PROB": 0.0} | _SINGLE


@dataclasses.dataclass(frozen=True)
class Model:
  """What is trained.

  Attributes:
    experiment: Its registered name.
    flags: KNOB -> value.
    peer: The script that trains the same with torch.
  """

  experiment: str
  flags: Flags
  peer: Side


MODELS = {
  "126m": Model("Synthetic126M", _ALL | _SINGLE, "torch_gpt"),
  "5b": Model("Synthetic5B", _ALL | _GPT_5B, "torch_gpt"),
  "5b-fp8": Model("Synthetic5B", _ALL | _GPT_5B | {"USE_FP8": True}, "torch_gpt"),
  "7b-lora": Model("SyntheticLLaMA7B", _ALL | _SINGLE | _LORA, "torch_llama"),
  "7b-sft": Model("SyntheticLLaMA7B", _ALL | _SINGLE, "torch_llama"),
  "tiny-gpt": Model("Synthetic126M", _ALL | _SINGLE | _TINY, "torch_gpt"),
  "tiny-fp8": Model("Synthetic126M", _ALL | _SINGLE | _TINY | {"USE_FP8": True}, "torch_gpt"),
  "tiny-lora": Model(
    "SyntheticLLaMA7B", _ALL | _SINGLE | _TINY | _LORA | {"LORA_RANK": 4}, "torch_llama"
  ),
  "tiny-sft": Model("SyntheticLLaMA7B", _ALL | _SINGLE | _TINY, "torch_llama"),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One process that measures one thing.

  Attributes:
    name: Of its row, and of its files.
    side: The script that it runs.
    least: Seconds without which it is not begun.
    model: One of MODELS; "" of the roofline.
    batch: Sequences a step.
    mode: Of torch.compile.
    again: Whether the same was measured before; its program is not written once more.
  """

  name: str
  side: Side
  least: float
  model: str = ""
  batch: int = 0
  mode: str = "default"
  again: bool = False


def _ours(model: str, batch: int, least: float) -> Case:
  return Case(f"{model}-b{batch}-ours", "gpu_ours", least, model, batch)


def _again(model: str, batch: int, least: float) -> Case:
  return Case(f"{model}-b{batch}-ours-again", "gpu_ours", least, model, batch, again=True)


def _peer(model: str, batch: int, least: float) -> Case:
  return Case(f"{model}-b{batch}-torch", MODELS[model].peer, least, model, batch)


def _autotuned(model: str, batch: int, least: float) -> Case:
  mode = "max-autotune-no-cudagraphs"
  return Case(f"{model}-b{batch}-torch-max", MODELS[model].peer, least, model, batch, mode)


def _compared(model: str, batch: int, least: float) -> list[Case]:
  """Ours, the peer, and ours again: what drifts in between shows as a difference of the two."""
  return [call(model, batch, least) for call in (_ours, _peer, _again)]


_ROOFLINE = Case("roofline", "gpu_roofline", 20)

# The most wanted come first: what the budget does not reach is left out.
SUITES: dict[str, list[Case]] = {
  "126m": [
    _ROOFLINE,
    *_compared("126m", 32, 40),
    _autotuned("126m", 32, 60),
    *_compared("126m", 64, 40),
    *_compared("126m", 16, 40),
    _autotuned("126m", 64, 60),
  ],
  "5b": [
    _ROOFLINE,
    *_compared("5b", 4, 60),
    *_compared("5b-fp8", 4, 60),
    *_compared("5b-fp8", 8, 60),
    *_compared("5b", 8, 60),
    _autotuned("5b", 4, 90),
  ],
  "lora": [_ROOFLINE, *(case for batch in (2, 4, 1) for case in _compared("7b-lora", batch, 60))],
  # With float32 weights and moments ours has no room for 4 sequences; bfloat16 ones may.
  "sft": [
    _ROOFLINE,
    *_compared("7b-sft", 2, 60),
    *_compared("7b-sft", 1, 60),
    _peer("7b-sft", 4, 60),
  ],
  "tiny": [
    _ROOFLINE,
    *_compared("tiny-gpt", 2, 1),
    *(
      call(model, 2, 1)
      for model in ("tiny-fp8", "tiny-lora", "tiny-sft")
      for call in (_ours, _peer)
    ),
  ],
}
