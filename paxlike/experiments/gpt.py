# SPDX-License-Identifier: Apache-2.0
"""GPT-3 (Brown et al., 2020) as Pax trained it on GPUs, and MaxText's 52k, 6B and 22B.

Pre-LN LayerNorm with epsilon 1e-5, learned positions, biases, GELU (tanh), tied embeddings. AdamW
with betas .9 / .95, weight decay .1 on every parameter, clipping at 1.0.
"""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints import hf_keys
from paxlike.checkpoints.hf_rules import Fused, Matrix, Same, Shifted
from paxlike.experiment import Experiment
from paxlike.experiments import datasets
from paxlike.registry import register


class Gpt(Experiment):
  """The GPT family; subclasses set the sizes."""

  VOCAB_SIZE = 50304
  MAX_SEQ_LEN = 2048
  PERCORE_BATCH_SIZE = 1
  MAX_STEPS = 100
  LEARNING_RATE = 3e-5
  LR_COS_WARMUP = 10

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    model.positions = fdl.Partial(
      layers.PositionEmbedding, max_len=self.MAX_SEQ_LEN, init=self.init()
    )
    return model

  def norm(self) -> fdl.Partial:
    return fdl.Partial(layers.LayerNorm, epsilon=1e-5, offset=1.0)

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    linear = super().linear(role)
    linear.use_bias = True
    return linear

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    at = "transformer.h.{}"
    rules = {
      "embedding.table": Same("transformer.wte.weight"),
      "positions.table": Same("transformer.wpe.weight"),
      "stack.{}.attention.output.w": Matrix(f"{at}.attn.c_proj.weight", inputs=2, transposed=False),
      "stack.{}.attention.output.b": Same(f"{at}.attn.c_proj.bias"),
    }
    for index, role in enumerate(("query", "key", "value")):
      ours, fused = f"stack.{{}}.attention.{role}", f"{at}.attn.c_attn"
      rules[f"{ours}.w"] = Fused(f"{fused}.weight", ndim=2, index=index, of=3)
      rules[f"{ours}.b"] = Fused(f"{fused}.bias", ndim=1, index=index, of=3)
    for role, theirs in (("up", "c_fc"), ("down", "c_proj")):
      rules[f"stack.{{}}.mlp.{role}.w"] = Same(f"{at}.mlp.{theirs}.weight")
      rules[f"stack.{{}}.mlp.{role}.b"] = Same(f"{at}.mlp.{theirs}.bias")
    norms = {"stack.{}.attention_norm": f"{at}.ln_1", "stack.{}.mlp_norm": f"{at}.ln_2"}
    for ours, theirs in (norms | {"norm": "transformer.ln_f"}).items():
      rules[f"{ours}.scale"] = Shifted(f"{theirs}.weight")
      rules[f"{ours}.bias"] = Same(f"{theirs}.bias")
    return hugging_face.Family(
      model_type="gpt2",
      architecture="GPT2LMHeadModel",
      knobs={
        "vocab_size": "VOCAB_SIZE",
        "n_positions": "MAX_SEQ_LEN",
        "n_layer": "NUM_LAYERS",
        "n_embd": "MODEL_DIMS",
        "n_inner": ("HIDDEN_DIMS", None),
        "n_head": "NUM_HEADS",
      },
      nullable=frozenset({"n_inner"}),
      fixed={
        "activation_function": ("gelu_new", *hf_keys.GELU_TANH),
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
      },
      neutral=frozenset(
        {"resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn", "n_ctx"}
        | {"summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"}
        | {"summary_first_dropout"}
      ),
      rules=rules,
      prefix="transformer.",
      # Masks, and a copy of the embedding table.
      ignored=frozenset({r".*\.attn\.(masked_)?bias"}),
      copies={"lm_head.weight": "transformer.wte.weight"},
    )


class Gpt126M(Gpt):
  """125,262,336 parameters. Published on 64 H100, data parallel: 4,709 sequences/s, BF16."""

  NUM_LAYERS = 12
  NUM_HEADS = 12
  MODEL_DIMS = 768
  HIDDEN_DIMS = 3072
  DIMS_PER_HEAD = 64
  INIT_STD = 0.023
  PERCORE_BATCH_SIZE = 4
  MAX_STEPS = 600_000
  LEARNING_RATE = 6e-4
  LR_COS_WARMUP = 636
  LR_COS_DECAY_START = 637
  LR_COS_DECAY_END = 500_000


class Gpt5B(Gpt):
  """5,047,558,144 parameters. Published on 256 H100, FSDP: 1,657 sequences/s, BF16."""

  NUM_LAYERS = 24
  NUM_HEADS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 16384
  DIMS_PER_HEAD = 128
  INIT_STD = 0.01
  EMBEDDING_DROPOUT_PROB = 0.1
  USE_REPEATED_LAYER = True
  CHECKPOINT_POLICY = "SAVE_DOT_WITH_NO_BATCH_DIM"
  ICI_MESH_SHAPE = (1, -1, 1)
  PERCORE_BATCH_SIZE = 8
  MAX_STEPS = 75_000
  LEARNING_RATE = 1.6e-4
  LR_COS_WARMUP = 115
  LR_COS_DECAY_START = 116
  LR_COS_DECAY_END = 62_500
  CHECKPOINT_EVERY_N_STEPS = 250
  SUMMARY_INTERVAL_STEPS = 10


class Gpt175B(Gpt):
  """174,604,259,328 parameters. Published on 256 H100, FSDP: 51.0 sequences/s, BF16."""

  VOCAB_SIZE = 50257
  NUM_LAYERS = 96
  NUM_HEADS = 96
  MODEL_DIMS = 12288
  HIDDEN_DIMS = 49152
  INIT_STD = 0.006
  USE_REPEATED_LAYER = True
  CHECKPOINT_POLICY = "SAVE_NOTHING"
  ICI_MESH_SHAPE = (1, -1, 1)
  PERCORE_BATCH_SIZE = 6
  MAX_STEPS = 75_000
  LEARNING_RATE = 2e-5
  LR_COS_WARMUP = 265
  LR_COS_DECAY_START = 266
  LR_COS_DECAY_END = 108_600
  CHECKPOINT_EVERY_N_STEPS = 100
  SUMMARY_INTERVAL_STEPS = 10


@register
class Pile126M(datasets.Pile, Gpt126M):
  """GPT 126M on the Pile. Published on 64 H100: LAMBADA 42.5 % after 600,000 steps."""


@register
class Pile5B(datasets.Pile, Gpt5B):
  """GPT 5B on the Pile."""


@register
class Pile175B(datasets.Pile, Gpt175B):
  """GPT 175B on the Pile."""


@register
class C4Gpt126M(datasets.C4, Gpt126M):
  """GPT 126M on C4."""


@register
class C4Gpt175B(datasets.C4, Gpt175B):
  """GPT 175B on C4, with the peak learning rate of GPT-3, 6e-5; Pax's C4SpmdGpt3AdamOrgHP."""

  LEARNING_RATE = 6e-5


@register
class Lambada126M(datasets.Lambada, Gpt126M):
  """GPT 126M zero-shot on LAMBADA, from the run of `Pile126M`."""


@register
class Synthetic126M(datasets.Synthetic, Gpt126M):
  """GPT 126M on synthetic tokens, to measure speed."""

  MAX_STEPS = 100


@register
class Synthetic5B(datasets.Synthetic, Gpt5B):
  """GPT 5B on synthetic tokens, to measure speed."""

  MAX_STEPS = 100


@register
class Synthetic175B(datasets.Synthetic, Gpt175B):
  """GPT 175B on synthetic tokens, to measure speed."""

  MAX_STEPS = 100


@register
class Text126M(datasets.LocalText, Gpt126M):
  """GPT 126M on your own files: --fdl.DATA_PATH=... and, if you have one, --fdl.VOCAB_PATH=..."""


@register
class Prepared126M(datasets.Prepared, Gpt126M):
  """GPT 126M on data of scripts/prepare_data.py: --fdl.DATA_PATH=..."""


@register
class Gpt3_6B(datasets.Synthetic, Gpt):
  """MaxText's gpt3-6b. 5,588,736,000 parameters, including 16,384 position embeddings."""

  VOCAB_SIZE = 32768
  MAX_SEQ_LEN = 16384
  NUM_LAYERS = 48
  NUM_HEADS = 12
  MODEL_DIMS = 3072
  DIMS_PER_HEAD = 256
  ICI_MESH_SHAPE = (1, -1, 1)


@register
class Gpt3_22B(Gpt3_6B):
  """MaxText's gpt3-22b. 22,049,107,968 parameters, including 16,384 position embeddings."""

  NUM_HEADS = 24
  MODEL_DIMS = 6144


@register
class Gpt3_52k(datasets.Synthetic, Gpt):
  """MaxText's gpt3-52k: one layer, for experiments. 52,464 parameters."""

  VOCAB_SIZE = 1024
  NUM_LAYERS = 1
  NUM_HEADS = 2
  MODEL_DIMS = 16
  HIDDEN_DIMS = 64
  DIMS_PER_HEAD = 8
