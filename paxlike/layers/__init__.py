# SPDX-License-Identifier: Apache-2.0
"""The parts that models are made of: plain modules, usable without any configuration."""

from paxlike.layers import (
  attention_kernels,
  context_attention,
  dispatch,
  lora,
  quantization,
  rope,
  routing,
  transformer_engine,
)
from paxlike.layers.attention import Attention
from paxlike.layers.auto_attention import auto
from paxlike.layers.block import Block
from paxlike.layers.cache import KvCache, LatentCache
from paxlike.layers.chunked_attention import xla_chunked
from paxlike.layers.context import Context
from paxlike.layers.cudnn_attention import cudnn
from paxlike.layers.decoder import Decoder
from paxlike.layers.dropout import Dropout
from paxlike.layers.embedding import Embedding, PositionEmbedding
from paxlike.layers.experts import ExpertLinear, Experts
from paxlike.layers.fp8 import DelayedFp8, Fp8
from paxlike.layers.int8 import Int8
from paxlike.layers.latent_attention import LatentAttention
from paxlike.layers.linear import Linear
from paxlike.layers.lora import Lora
from paxlike.layers.loss import cross_entropy
from paxlike.layers.mlp import Mlp, clamped_swiglu, geglu, swiglu
from paxlike.layers.module import (
  Definition,
  Module,
  Params,
  constant,
  gaussian,
  gaussian_fan_in,
  zeros,
)
from paxlike.layers.moe import Moe
from paxlike.layers.mxfp8 import MxFp8
from paxlike.layers.norm import LayerNorm, RmsNorm
from paxlike.layers.pipeline import Pipeline
from paxlike.layers.relative_bias import RelativeBias
from paxlike.layers.remat import Remat
from paxlike.layers.rope import Rope
from paxlike.layers.splash_attention import splash
from paxlike.layers.stack import Stack
from paxlike.layers.tokamax_attention import tokamax
from paxlike.layers.transformer_engine import TransformerEngine

__all__ = [
  "Attention",
  "Block",
  "Context",
  "Decoder",
  "Definition",
  "DelayedFp8",
  "Dropout",
  "Embedding",
  "ExpertLinear",
  "Experts",
  "Fp8",
  "Int8",
  "KvCache",
  "LatentAttention",
  "LatentCache",
  "LayerNorm",
  "Linear",
  "Lora",
  "Mlp",
  "Module",
  "Moe",
  "MxFp8",
  "Params",
  "Pipeline",
  "PositionEmbedding",
  "RelativeBias",
  "Remat",
  "RmsNorm",
  "Rope",
  "Stack",
  "TransformerEngine",
  "attention_kernels",
  "auto",
  "clamped_swiglu",
  "constant",
  "context_attention",
  "cross_entropy",
  "cudnn",
  "dispatch",
  "gaussian",
  "gaussian_fan_in",
  "geglu",
  "lora",
  "quantization",
  "rope",
  "routing",
  "splash",
  "swiglu",
  "tokamax",
  "transformer_engine",
  "xla_chunked",
  "zeros",
]
