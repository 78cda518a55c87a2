# SPDX-License-Identifier: Apache-2.0
"""The knobs of initial weights and of LoRA, and the methods that use them."""

from typing import Literal

import fiddle as fdl

from paxlike import fiddlers, layers
from paxlike.checkpoints.warm_start import Restore
from paxlike.config import ranges
from paxlike.config.knobs import Knobs
from paxlike.errors import UserError


class FineTuningKnobs(Knobs):
  """Fine-tuning: initial weights from a checkpoint, and LoRA adapters."""

  #: Folder of a run or converted model to restore initial weights from. None: initialize all.
  CHECKPOINT_RESTORE_PATH: ranges.Path | None = None
  CHECKPOINT_RESTORE_STEP: ranges.NonNegative | None = None  #: Its checkpoint. None: the newest.
  CHECKPOINT_INCLUDE_RULES: tuple[str, ...] = ("",)  #: Patterns of weights to restore.
  CHECKPOINT_IGNORE_RULES: tuple[str, ...] = ()  #: Patterns of weights to initialize anyway.
  USE_LORA: bool = False  #: Train only LoRA adapters.
  LORA_RANK: ranges.Size = 8  #: Rank of the adapters.
  LORA_ALPHA: ranges.Factor | None = None  #: Scale: LORA_ALPHA / LORA_RANK. None: 1.
  LORA_RSLORA: bool = False  #: Scale: LORA_ALPHA / sqrt(LORA_RANK) (rsLoRA).
  LORA_DORA: bool = False  #: Also train the magnitude of each output (DoRA).
  LORA_DROPOUT: ranges.Probability = 0.0  #: Dropout of the adapters' inputs.
  LORA_BASE_QUANTIZATION: Literal["int8", "nf4"] | None = (
    None  #: Weight-only quantization of the base model's matrices (QLoRA). None: compute dtype.
  )
  #: What to adapt: all (linear maps), attention, recurrent, mlp, experts, or roles: query,up,head.
  LORA_TARGET_LAYERS: ranges.Name = "all"

  def restore(self) -> fdl.Config[Restore] | None:
    """Returns the source of initial weights; None: all are initialized."""
    if self.CHECKPOINT_RESTORE_PATH is None:
      return None
    return fdl.Config(
      Restore,
      path=self.CHECKPOINT_RESTORE_PATH,
      step=self.CHECKPOINT_RESTORE_STEP,
      include=self.CHECKPOINT_INCLUDE_RULES,
      ignore=(*self.CHECKPOINT_IGNORE_RULES, *([layers.lora.WEIGHTS] if self.USE_LORA else [])),
    )

  def lora_scale(self) -> float:
    """Returns the multiplier of the adapters' outputs."""
    return layers.lora.scale_of(self.LORA_RANK, self.LORA_ALPHA, rslora=self.LORA_RSLORA)

  def adapt(self, graph: fdl.Buildable):
    """Adds LoRA, if USE_LORA, to a graph that contains the model."""
    if self.USE_LORA and self.LORA_RSLORA and self.LORA_ALPHA is None:
      raise UserError("LORA_RSLORA=True scales by LORA_ALPHA / sqrt(LORA_RANK): set LORA_ALPHA.")
    if self.USE_LORA:
      fiddlers.lora(
        graph,
        rank=self.LORA_RANK,
        alpha=self.LORA_ALPHA,
        dropout=self.LORA_DROPOUT,
        roles=[role.strip() for role in self.LORA_TARGET_LAYERS.split(",")],
        base=self.LORA_BASE_QUANTIZATION,
        rslora=self.LORA_RSLORA,
        dora=self.LORA_DORA,
      )
