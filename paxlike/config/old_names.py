# SPDX-License-Identifier: Apache-2.0
"""Aliases for public names in config files of older versions.

Add an entry whenever a public name changes, and never remove one. tests/test_golden.py checks this
with runs of older versions.
"""

# Version 0.1 saved names with modules ("paxlike.layers.norm:RmsNorm"). Folder -> its old modules.
_OLD_MODULES = {
  "paxlike.checkpoints": "paxlike.restoring",
  "paxlike.data": """
    paxlike.data.conversations paxlike.data.examples paxlike.data.mixture paxlike.data.packing
    paxlike.data.preferences paxlike.data.prepared paxlike.data.seqio_corpus
    paxlike.data.seqio_stream paxlike.data.synthetic paxlike.data.tasks paxlike.data.text
    paxlike.data.tokenizer
  """,
  "paxlike.devices": "paxlike.mesh",
  "paxlike.layers": """
    paxlike.layers.attention paxlike.layers.attention_kernels paxlike.layers.auto_attention
    paxlike.layers.block paxlike.layers.chunked_attention paxlike.layers.context_attention
    paxlike.layers.cudnn_attention paxlike.layers.decoder paxlike.layers.dispatch
    paxlike.layers.dropout paxlike.layers.embedding paxlike.layers.experts paxlike.layers.fp8
    paxlike.layers.int8 paxlike.layers.latent_attention paxlike.layers.linear paxlike.layers.lora
    paxlike.layers.mlp paxlike.layers.module paxlike.layers.moe paxlike.layers.mxfp8
    paxlike.layers.norm paxlike.layers.pipeline paxlike.layers.relative_bias paxlike.layers.remat
    paxlike.layers.rope paxlike.layers.routing paxlike.layers.splash_attention paxlike.layers.stack
    paxlike.layers.tokamax_attention paxlike.layers.transformer_engine
  """,
  "paxlike.training": """
    paxlike.best paxlike.evaluation paxlike.objectives paxlike.optimizers paxlike.trainer
  """,
}
_FOLDERS = {old: folder for folder, text in _OLD_MODULES.items() for old in text.split()}

# Old name -> current name, if the symbol was renamed.
_NAMES: dict[str, str] = {
  "paxlike.data.python_corpus:dataset": "paxlike.data:python_corpus",
  "paxlike.layers.quantization:int4": "paxlike.layers:weight_only.int4",
  "paxlike.layers.quantization:int8": "paxlike.layers:weight_only.int8",
  "paxlike.layers.quantization:int8_columns": "paxlike.layers:weight_only.int8_columns",
  "paxlike.layers.quantization:nf4": "paxlike.layers:weight_only.nf4",
  "paxlike.layers.rope:linear": "paxlike.layers:rope.linear",
  "paxlike.layers.rope:llama3": "paxlike.layers:rope.llama3",
  "paxlike.layers.rope:yarn": "paxlike.layers:rope.yarn",
  "paxlike.optimizers:constant": "paxlike.training:constant_schedule",
}


def current(name: str) -> str:
  """Returns the current name for a name saved by any version."""
  module, colon, symbol = name.partition(":")
  return _NAMES.get(name) or f"{_FOLDERS.get(module, module)}{colon}{symbol}"
