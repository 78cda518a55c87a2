# SPDX-License-Identifier: Apache-2.0
"""What policies of rematerialization leave to be computed again."""

import re
from typing import Any

import fiddle as fdl
import jax
import pytest

from paxlike import registry
from paxlike.devices import topology

SIZES = {"NUM_LAYERS": 2, "MODEL_DIMS": 512, "HIDDEN_DIMS": 1408, "NUM_HEADS": 4}
KNOBS = SIZES | {"USE_REPEATED_LAYER": True, "VOCAB_SIZE": 4096, "MAX_SEQ_LEN": 256}


def num_products(target: str, **knobs: Any) -> int:
  """Returns how many products the program of a step has, the layers' counted once."""
  with topology.target(target):
    trainer: Any = fdl.build(registry.find("SyntheticLLaMA7B")(**KNOBS, **knobs).trainer())
    with jax.set_mesh(trainer.devices):
      text = trainer.lower(*trainer.abstract()).as_text()
  return len(re.findall(r"dot_general|call @_scaled_matmul", text))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["SAVE_DOT_ONLY", "SAVE_DOT_WITH_NO_BATCH_DIM"])
@pytest.mark.parametrize(
  ("target", "quantization"),
  [
    ("h100-8", "none"),
    ("h100-8", "fp8"),
    ("v5e-8", "none"),
    ("v5e-8", "int8"),
    ("b200-8", "mxfp8"),
  ],
)
def test_products_that_are_saved_are_not_made_again(target, quantization, policy):
  again, once = (
    num_products(target, QUANTIZATION=quantization, CHECKPOINT_POLICY=name)
    for name in ("SAVE_NOTHING", policy)
  )
  # Of q, k, v, what attention gives, and the gate and the first product of the MLP; nothing needs
  # its last one.
  assert again - once == 6
