# SPDX-License-Identifier: Apache-2.0
"""Every family of models, each in one of its sizes, shrunk."""

from typing import Any

import fiddle as fdl

from paxlike import fiddlers, registry
from paxlike.layers import Stack
from paxlike.layers.module import Definition

ONE_OF_EACH = (
  "Synthetic126M",
  "SyntheticLLaMA70B",
  "Llama31_8B",
  "Llama4Maverick",
  "Mistral7B",
  "Mixtral8x7B",
  "Gemma2B",
  "Gemma2_2B",
  "Gemma3_1B",
  "Gemma4_31B",
  "Qwen3_8B",
  "Qwen3_30B_A3B",
  "Olmo2_1B",
  "Qwen3Next80B_A3B",
  "GptOss20B",
  "SyntheticGLaM126M64E",
  "DeepSeekV3",
  "DeepSeekV32",
  "FalconH1_0_5B",
  "Nemotron3_Nano_30B_A3B",
)
# Patterns that are long, in a short form with every kind of layer.
SHORT = {
  "Llama4Maverick": {"GLOBAL_EVERY": 2},
  "Nemotron3_Nano_30B_A3B": {
    "LAYER_TYPES": 2 * ("mamba", "attention", "mlp", "moe"),
    "NUM_LAYERS": 8,
  },
  # With what other sizes of Gemma 4 have.
  "Gemma4_E2B": {
    "NUM_LAYERS": 4,
    "GLOBAL_EVERY": 2,
    "NUM_KV_LAYERS": 2,
    "USE_KEYS_AS_VALUES": True,
    "NUM_EXPERTS": 8,
    "NUM_EXPERTS_PER_TOKEN": 2,
  },
}


def shrunk(
  name: str,
  *,
  scan: bool = False,
  dtype: str = "float32",
  remat: str = "SAVE_EVERYTHING",
  repeats: int = 2,
  pipeline: fdl.Config | None = None,
  **knobs: Any,
) -> Definition:
  graph = registry.find(name)(**{**SHORT.get(name, {}), **knobs}).trainer()
  fiddlers.shrink(graph)
  for stack in fiddlers.select(graph, Stack):
    stack.repeats = repeats
    if name == "Qwen3Next80B_A3B":  # Of three linear layers, and one of attention.
      stack.pattern = stack.pattern[2:]
  fiddlers.stack(graph, scan=scan)
  if pipeline is not None:
    fiddlers.pipeline(graph, pipeline)
  fiddlers.precision(graph, dtype)
  fiddlers.remat(graph, remat)
  return fdl.build(graph).definition
