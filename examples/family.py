# SPDX-License-Identifier: Apache-2.0
"""A model family with its mapping to Hugging Face, outside the package.

With this module allowed, a folder whose `config.json` has `"model_type": "parrot"` is read by

    paxlike-convert --from=hf --path=FOLDER --to=DIR --fdl_allow_modules=examples.family
    paxlike.load(FOLDER, allow_modules=["examples.family"])

and `Model.export` writes such a folder.
"""

import paxlike
from paxlike.checkpoints import hf_keys
from paxlike.checkpoints.hf_family import Family
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Matrix, Same
from paxlike.experiments.llama import Llama


class Parrot(Llama):
  """LLaMA under other names."""

  @classmethod
  def hugging_face(cls) -> Family:
    at = "h.{}"
    return Family(
      model_type="parrot",
      architecture="ParrotForCausalLM",
      knobs={
        "vocab_size": "VOCAB_SIZE",
        "n_positions": "MAX_SEQ_LEN",
        "n_layer": "NUM_LAYERS",
        "n_embd": "MODEL_DIMS",
        "n_inner": "HIDDEN_DIMS",
        "n_head": "NUM_HEADS",
        "norm_eps": "NORM_EPSILON",
      },
      fixed={"hidden_act": hf_keys.SILU, "tie_word_embeddings": False},
      rope=HfRope(),
      rules={
        "embedding.table": Same("wte.weight"),
        "stack.{}.attention_norm.scale": Same(f"{at}.norm_1.weight"),
        "stack.{}.attention.query.w": Matrix(f"{at}.attn.q.weight"),
        "stack.{}.attention.key.w": Matrix(f"{at}.attn.k.weight"),
        "stack.{}.attention.value.w": Matrix(f"{at}.attn.v.weight"),
        "stack.{}.attention.output.w": Matrix(f"{at}.attn.o.weight", inputs=2),
        "stack.{}.mlp_norm.scale": Same(f"{at}.norm_2.weight"),
        "stack.{}.mlp.gate.w": Matrix(f"{at}.mlp.gate.weight"),
        "stack.{}.mlp.up.w": Matrix(f"{at}.mlp.up.weight"),
        "stack.{}.mlp.down.w": Matrix(f"{at}.mlp.down.weight"),
        "norm.scale": Same("norm.weight"),
        "head.w": Matrix("head.weight"),
      },
    )


@paxlike.register
class TinyParrot(paxlike.datasets.LocalText, Parrot):
  """Small enough for a laptop; registering it makes the family known."""

  VOCAB_SIZE = 257
  NUM_LAYERS = 2
  MODEL_DIMS = 64
  HIDDEN_DIMS = 128
  NUM_HEADS = 4
  MAX_SEQ_LEN = 64
