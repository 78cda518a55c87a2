# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/gpu.py measures: models, their sizes, and who is compared with whom."""

import dataclasses
from typing import Any, Literal

Side = Literal["gpu_roofline", "gpu_ours", "torch_gpt", "torch_llama", "torch_liger"]
Flags = dict[str, Any]

# One rate for both sides: no schedule is a part of the comparison.
_ALL: Flags = {"LR_SCHEDULE": "constant", "LEARNING_RATE": 1e-5}
# What is fastest on one device; the published recipes are for many.
_SINGLE: Flags = {"USE_REPEATED_LAYER": False, "CHECKPOINT_POLICY": "SAVE_EVERYTHING"}
# torch's AdamW has its moments in the dtype of the weights: in bfloat16 both sides have both.
_BF16: Flags = {"WEIGHT_DTYPE": "bfloat16", "ADAM_MOMENT_DTYPE": "bfloat16"}
_LLAMA: Flags = _ALL | _SINGLE | _BF16
_LORA: Flags = {"USE_LORA": True, "LORA_RANK": 32}
_FP8: Flags = {"USE_FP8": True}
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
  "5b-fp8": Model("Synthetic5B", _ALL | _GPT_5B | _FP8, "torch_gpt"),
  "7b-lora": Model("SyntheticLLaMA7B", _LLAMA | _LORA, "torch_llama"),
  "7b-sft": Model("SyntheticLLaMA7B", _LLAMA, "torch_llama"),
  "7b-sft-fp8": Model("SyntheticLLaMA7B", _LLAMA | _FP8, "torch_llama"),
  "tiny-gpt": Model("Synthetic126M", _ALL | _SINGLE | _TINY, "torch_gpt"),
  "tiny-fp8": Model("Synthetic126M", _ALL | _SINGLE | _TINY | _FP8, "torch_gpt"),
  "tiny-lora": Model("SyntheticLLaMA7B", _LLAMA | _TINY | _LORA | {"LORA_RANK": 4}, "torch_llama"),
  "tiny-sft": Model("SyntheticLLaMA7B", _LLAMA | _TINY, "torch_llama"),
  "tiny-sft-fp8": Model("SyntheticLLaMA7B", _LLAMA | _TINY | _FP8, "torch_llama"),
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


def _liger(model: str, batch: int, least: float) -> Case:
  return Case(f"{model}-b{batch}-liger", "torch_liger", least, model, batch)


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
  "lora": [
    _ROOFLINE,
    *_compared("7b-lora", 2, 60),
    *_compared("7b-lora", 4, 60),
    _liger("7b-lora", 4, 60),
    *_compared("7b-lora", 1, 60),
    _liger("7b-lora", 2, 60),
  ],
  "sft": [
    _ROOFLINE,
    *_compared("7b-sft", 4, 60),
    *_compared("7b-sft-fp8", 4, 60),
    *_compared("7b-sft", 2, 60),
    _liger("7b-sft", 4, 60),
    *_compared("7b-sft-fp8", 2, 60),
    *_compared("7b-sft", 1, 60),
  ],
  "tiny": [
    _ROOFLINE,
    *_compared("tiny-gpt", 2, 1),
    *(
      call(model, 2, 1)
      for model in ("tiny-fp8", "tiny-lora", "tiny-sft", "tiny-sft-fp8")
      for call in (_ours, _peer)
    ),
  ],
}
