# SPDX-License-Identifier: Apache-2.0
"""The peer of LLaMA in benchmarks/gpu.py, with the kernels of Liger: see `torch_llama`.

They are RoPE, RMSNorm, the gated activation, and the loss together with the output projection.
"""

import functools
import importlib.metadata

import peft
import torch_llama
import torch_training
import transformers
from liger_kernel import transformers as liger  # pyright: ignore[reportMissingImports]
from torch import Tensor


class WithLoss(torch_llama.WithLoss):
  """A model that never has all logits."""

  def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the mean over tokens, in nats."""
    return self.model(input_ids=inputs_BT, shift_labels=targets_BT, use_cache=False).loss


if __name__ == "__main__":
  liger.apply_liger_kernel_to_llama()
  torch_training.run(
    functools.partial(torch_llama.make, with_loss=WithLoss),
    transformers=transformers.__version__,
    peft=peft.__version__,
    liger=importlib.metadata.version("liger-kernel"),
  )
