# SPDX-License-Identifier: Apache-2.0
"""The layers of models: plain Python modules, usable without the configuration system.

A tensor's name ends in the letters of its dims, as in `x_BTD`; docs/legend.md lists them.
"""

from paxlike.layers import lora, multi_token
from paxlike.layers.activations import clamped_swiglu, geglu, squared_relu, swiglu
from paxlike.layers.attention import rope
from paxlike.layers.attention.attention import Attention, KvSource
from paxlike.layers.attention.auto import auto
from paxlike.layers.attention.cache import IndexedLatentCache, KvCache, LatentCache
from paxlike.layers.attention.chunked import xla_chunked
from paxlike.layers.attention.context_parallel import gathered, ring
from paxlike.layers.attention.cudnn import cudnn
from paxlike.layers.attention.flash_cpu import flash_cpu
from paxlike.layers.attention.indexer import Indexer
from paxlike.layers.attention.kernel_table import KERNELS, KernelName
from paxlike.layers.attention.kernels import xla
from paxlike.layers.attention.latent_attention import LatentAttention
from paxlike.layers.attention.qk_clip import QkClip
from paxlike.layers.attention.relative_bias import RelativeBias
from paxlike.layers.attention.rope import LongRope, Rope
from paxlike.layers.attention.sparse_latent_attention import SparseLatentAttention
from paxlike.layers.attention.splash import splash
from paxlike.layers.attention.temperature import long_context_scale
from paxlike.layers.attention.tokamax import tokamax
from paxlike.layers.block import Block
from paxlike.layers.call_context import Context
from paxlike.layers.decoder import Decoder
from paxlike.layers.delayed_fp8 import DelayedFp8
from paxlike.layers.dropout import Dropout
from paxlike.layers.embedding import Embedding, PositionEmbedding
from paxlike.layers.linear import Linear
from paxlike.layers.lora import Dora, EmbeddingLora, ExpertLora, Lora
from paxlike.layers.lora_bank import LoraBank
from paxlike.layers.loss import cross_entropy
from paxlike.layers.mlp import Mlp
from paxlike.layers.module import (
  Definition,
  Module,
  Params,
  constant,
  gaussian,
  gaussian_fan_in,
  scaled,
  zeros,
)
from paxlike.layers.moe import dispatch, routing
from paxlike.layers.moe.experts import ExpertLinear, Experts
from paxlike.layers.moe.moe import InputWeightedMoe, Moe
from paxlike.layers.multi_token import MtpKind, ParallelMtp, SequentialMtp
from paxlike.layers.norm import GroupedRmsNorm, LayerNorm, RmsNorm, UnscaledRmsNorm
from paxlike.layers.per_layer_input import PerLayerEmbedding, PerLayerInput
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.precision import transformer_engine, weight_only
from paxlike.layers.precision.fp8 import Fp8
from paxlike.layers.precision.int8 import Int8
from paxlike.layers.precision.mxfp8 import MxFp8
from paxlike.layers.precision.quantization_aware import QatFp8, QatFp8Blocks, QatInt4, QatInt8
from paxlike.layers.precision.transformer_engine import TransformerEngine
from paxlike.layers.recurrent.cache import RecurrentCache
from paxlike.layers.recurrent.gated_delta_net import GatedDeltaNet
from paxlike.layers.recurrent.mamba2 import Mamba2
from paxlike.layers.recurrent.mixer import RecurrentMixer
from paxlike.layers.recurrent.parallel import ParallelMixer
from paxlike.layers.recurrent.short_conv import ShortConv
from paxlike.layers.remat import Remat
from paxlike.layers.reward_model import RewardModel
from paxlike.layers.stack import Stack

__all__ = [
  "KERNELS",
  "Attention",
  "Block",
  "Context",
  "Decoder",
  "Definition",
  "DelayedFp8",
  "Dora",
  "Dropout",
  "Embedding",
  "EmbeddingLora",
  "ExpertLinear",
  "ExpertLora",
  "Experts",
  "Fp8",
  "GatedDeltaNet",
  "GroupedRmsNorm",
  "IndexedLatentCache",
  "Indexer",
  "InputWeightedMoe",
  "Int8",
  "KernelName",
  "KvCache",
  "KvSource",
  "LatentAttention",
  "LatentCache",
  "LayerNorm",
  "Linear",
  "LongRope",
  "Lora",
  "LoraBank",
  "Mamba2",
  "Mlp",
  "Module",
  "Moe",
  "MtpKind",
  "MxFp8",
  "ParallelMixer",
  "ParallelMtp",
  "Params",
  "PerLayerEmbedding",
  "PerLayerInput",
  "Pipeline",
  "PositionEmbedding",
  "QatFp8",
  "QatFp8Blocks",
  "QatInt4",
  "QatInt8",
  "QkClip",
  "RecurrentCache",
  "RecurrentMixer",
  "RelativeBias",
  "Remat",
  "RewardModel",
  "RmsNorm",
  "Rope",
  "SequentialMtp",
  "ShortConv",
  "SparseLatentAttention",
  "Stack",
  "TransformerEngine",
  "UnscaledRmsNorm",
  "auto",
  "clamped_swiglu",
  "constant",
  "cross_entropy",
  "cudnn",
  "dispatch",
  "flash_cpu",
  "gathered",
  "gaussian",
  "gaussian_fan_in",
  "geglu",
  "long_context_scale",
  "lora",
  "multi_token",
  "ring",
  "rope",
  "routing",
  "scaled",
  "splash",
  "squared_relu",
  "swiglu",
  "tokamax",
  "transformer_engine",
  "weight_only",
  "xla",
  "xla_chunked",
  "zeros",
]
