# SPDX-License-Identifier: Apache-2.0
"""Mixins for families with Mamba-2 layers: knobs, and stacks of layers of several kinds."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints.hf_rules import Matrix, Rules, Same, Taps, either, stacked
from paxlike.config import ranges
from paxlike.experiments.llama import Llama
from paxlike.layers.layer_pattern import Sections

# Bounds of Mamba-2's steps in `config.json`: none.
NO_STEP_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], None)
# Keys of Mamba-2 in the `config.json` of Granite 4.0 and Falcon-H1: knobs and their defaults.
MAMBA_KEYS = {
  "mamba_n_heads": ("MAMBA_NUM_HEADS", 128),
  "mamba_d_state": ("MAMBA_STATE_DIMS", 256),
  "mamba_n_groups": ("MAMBA_NUM_GROUPS", 1),
  "mamba_d_conv": ("MAMBA_CONV_TAPS", 4),
  "mamba_conv_bias": ("MAMBA_CONV_BIAS", True),
}

Kind = Literal["mamba", "attention", "mlp", "moe"]
LETTERS: dict[str, Kind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def kinds(letters: str) -> tuple[Any, ...]:
  """Returns the kinds of layers that a pattern has, such as M-M*, in Megatron's letters."""
  return tuple(LETTERS[letter] for letter in letters)


class Mamba(Llama):
  """A mixin for families derived from Llama: `self.mamba()` is a Mamba-2 layer."""

  MAMBA_NUM_HEADS: ranges.Size = 64  #: Heads of a Mamba-2 layer.
  MAMBA_DIMS_PER_HEAD: ranges.Size = 64  #: Width of its heads.
  MAMBA_STATE_DIMS: ranges.Size = 128  #: Width of a head's state, besides that of the head.
  MAMBA_NUM_GROUPS: ranges.Size = 1  #: Groups of heads that share keys and queries (B and C).
  MAMBA_CONV_TAPS: ranges.Size = 4  #: Tokens that its convolution sees.
  MAMBA_CONV_BIAS: bool = True  #: Bias of its convolution.

  def mamba(self) -> fdl.Partial[layers.Mamba2]:
    """Returns the Mamba-2 layer of a block."""
    conv = fdl.Partial(layers.ShortConv, taps=self.MAMBA_CONV_TAPS, use_bias=self.MAMBA_CONV_BIAS)
    maps = ("output_gate", "value", "key", "query", "step", "output")
    return fdl.Partial(
      layers.Mamba2,
      num_heads=self.MAMBA_NUM_HEADS,
      head_dim=self.MAMBA_DIMS_PER_HEAD,
      state_dim=self.MAMBA_STATE_DIMS,
      num_groups=self.MAMBA_NUM_GROUPS,
      conv=conv,
      norm=self.mamba_norm(),
      **{role: self.mamba_linear(role) for role in maps},
    )

  def mamba_linear(self, role: str) -> fdl.Partial[layers.Linear]:
    """Returns a linear map of a Mamba-2 layer."""
    linear = self.linear(role)
    linear.use_bias = False
    return linear

  def mamba_norm(self) -> fdl.Partial[layers.GroupedRmsNorm] | None:
    """Returns the norm before the output projection of a Mamba-2 layer."""
    return fdl.Partial(layers.GroupedRmsNorm, epsilon=self.NORM_EPSILON)


class Hybrid(Mamba):
  """A mixin: layers of several kinds, in any order; attention without rotary positions."""

  #: The kind of each layer. If NUM_LAYERS is not their number, their repeated part is repeated more
  #: or less often.
  LAYER_TYPES: tuple[Kind, ...] = ("mamba", "attention")
  USE_ROPE: bool = False  #: Rotary positions in attention.

  def stack(self) -> fdl.Partial[layers.Stack]:
    sections = Sections.of(self.LAYER_TYPES).with_layers(self.NUM_LAYERS)
    return fdl.Partial(
      layers.Stack,
      prologue=[self.layer(kind) for kind in sections.prologue],
      pattern=[self.layer(kind) for kind in sections.pattern],
      repeats=sections.repeats,
      epilogue=[self.layer(kind) for kind in sections.epilogue],
    )

  def layer(self, kind: str) -> fdl.Partial[layers.Block]:
    """Returns a layer of this kind."""
    return fdl.Partial(
      layers.Block,
      norm=self.norm(),
      attention=self.mixer(kind),
      mlp=self.feed_forward(kind),
      dropout=self.dropout(self.DROPOUT_PROB),
    )

  def mixer(self, kind: str) -> fdl.Partial | None:
    """Returns what mixes the tokens in a layer of this kind."""
    return self.mamba() if kind == "mamba" else self.attention()

  def feed_forward(self, kind: str) -> fdl.Partial | None:
    """Returns the feed-forward layer in a layer of this kind."""
    del kind
    return self.mlp()

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    if not self.USE_ROPE:
      attention.rope = None
    return attention


def expansion(config: Mapping[str, Any]) -> float:
  """Returns `mamba_expand`: the width of a Mamba-2 layer's heads, over that of the model."""
  factor = config["mamba_n_heads"] * config["mamba_d_head"] / config["hidden_size"]
  return int(factor) if factor.is_integer() else factor


def mamba_rules(ours: str, theirs: str) -> Rules:
  """Returns the rules of a Mamba-2 layer, given the prefixes of the names of its weights."""
  sections = ("output_gate", "value", "key", "query", "step")
  projections = {f"{ours}.{name}.w": Matrix("") for name in sections}
  convs = {f"{ours}.{name}_conv.w": Taps("") for name in sections[1:4]}
  biases = {f"{ours}.{name}_conv.b": Same("", ndim=1) for name in sections[1:4]}
  return {
    **stacked(f"{theirs}.in_proj.weight", projections),
    **stacked(f"{theirs}.conv1d.weight", convs),
    **stacked(f"{theirs}.conv1d.bias", biases),
    f"{ours}.step_bias": Same(f"{theirs}.dt_bias"),
    f"{ours}.log_rate": Same(f"{theirs}.A_log"),
    f"{ours}.skip": Same(f"{theirs}.D"),
    f"{ours}.norm.scale": Same(f"{theirs}.norm.weight", ndim=1),
    f"{ours}.output.w": Matrix(f"{theirs}.out_proj.weight", inputs=2),
  }


def hybrid_rules(theirs: str, others: Rules) -> Rules:
  """Returns the rules of a `Hybrid`, given the prefix of Mamba-2's tensors and the other rules."""
  ours = "stack.{}.attention"
  return either(f"{ours}.log_rate", mamba_rules(ours, theirs), others)
