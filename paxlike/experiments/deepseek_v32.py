# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv:2512.02556), also DeepSeek-V3.2-Exp: DeepSeek-V3 with
sparse attention. In every layer an indexer selects the 2,048 tokens that a query attends to.

It was made of DeepSeek-V3.1 in two stages. In the first, attention was dense and only the indexer
was trained (`INDEX_TOP_K` of at least `MAX_SEQ_LEN`); in the second, all weights were, while the
indexer's loss trained only the indexer, as it always does here.

The published model multiplies the indexer's queries and keys in FP8 after a Hadamard transform,
which leaves dot products as they are; here they have the compute dtype.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerPattern
from paxlike.checkpoints.hf_rules import Matrix, Same
from paxlike.config import ranges
from paxlike.errors import UserError
from paxlike.experiments import datasets
from paxlike.experiments.deepseek import DeepSeek
from paxlike.registry import register


class DeepSeekSparse(DeepSeek):
  """The DeepSeek-V3.2 family."""

  INDEX_NUM_HEADS: ranges.Size = 64  #: Heads of the indexer.
  INDEX_DIMS_PER_HEAD: ranges.Size = 128  #: Width of a head of the indexer.
  INDEX_TOP_K: ranges.Size = 2048  #: Tokens that a query attends to; they are those of best score.
  INDEX_LOSS_WEIGHT: ranges.Weight = 1.0  #: Weight of the loss that trains the indexer.

  def attention(self) -> fdl.Partial[layers.SparseLatentAttention]:
    if self.QUERY_LATENT_DIMS is None:
      raise UserError(
        "QUERY_LATENT_DIMS is None: the queries of the indexer are projected from the latent of"
        " queries, so give its rank."
      )
    attention: Any = super().attention()
    fdl.update_callable(attention, layers.SparseLatentAttention)
    attention.indexer = self.indexer()
    attention.loss_weight = self.INDEX_LOSS_WEIGHT
    return attention

  def indexer(self) -> fdl.Partial[layers.Indexer]:
    """Returns the indexer; unlike the attention's, its rotary pairs are not interleaved."""
    rope = self.rope()
    rope.interleaved = False
    return fdl.Partial(
      layers.Indexer,
      num_heads=self.INDEX_NUM_HEADS,
      head_dim=self.INDEX_DIMS_PER_HEAD,
      top_k=self.INDEX_TOP_K,
      query=self.linear("index_query"),
      key=self.linear("index_key"),
      weights=self.linear("index_weights"),
      norm=fdl.Partial(layers.LayerNorm, epsilon=1e-6),
      rope=rope,
    )

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    at = "model.layers.{}.self_attn.indexer"
    # Its queries always have a latent.
    family = dataclasses.replace(family, nullable=family.nullable - {"q_lora_rank"}, without={})
    return family.variant(
      model_type="deepseek_v32",
      other_types=(),
      architecture="DeepseekV32ForCausalLM",
      knobs={
        "index_n_heads": ("INDEX_NUM_HEADS", 64),
        "index_head_dim": ("INDEX_DIMS_PER_HEAD", 128),
        "index_topk": ("INDEX_TOP_K", 2048),
      },
      derived={"mlp_layer_types": _mlp_layer_types},
      layers=LayerPattern(("indexed_attention",)),
      rules={
        "stack.{}.attention.indexer.query.w": Matrix(f"{at}.wq_b.weight"),
        "stack.{}.attention.indexer.key.w": Matrix(f"{at}.wk.weight"),
        "stack.{}.attention.indexer.key_norm.scale": Same(f"{at}.k_norm.weight"),
        "stack.{}.attention.indexer.key_norm.bias": Same(f"{at}.k_norm.bias"),
        "stack.{}.attention.indexer.weights.w": Matrix(f"{at}.weights_proj.weight"),
      },
    )


def _mlp_layer_types(config: Mapping[str, Any]) -> list[str]:
  count, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
  if not isinstance(count, int) or not isinstance(dense, int):
    return []  # As knobs they are refused.
  return ["dense" if layer < dense else "sparse" for layer in range(count)]


@register
class DeepSeekV32(datasets.Synthetic, DeepSeekSparse):
  """DeepSeek-V3.2 671B. 671,877,929,216 parameters, router biases not counted."""

  NUM_LAYERS = 61
  MODEL_DIMS = 7168
  HIDDEN_DIMS = 18432
  EXPERT_DIMS = 2048
  NUM_HEADS = 128
