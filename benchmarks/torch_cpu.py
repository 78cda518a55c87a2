# SPDX-License-Identifier: Apache-2.0
"""The peer in torch of benchmarks/cpu.py: the model of `torch_gpt.py`, in float32."""

import torch
from plain_gpt import Sizes, random_batch
from torch import nn
from torch_gpt import Gpt


class TorchGpt:
  """The train step as an object: build once, then call `step()` as often as wanted."""

  def __init__(self, sizes: Sizes, *, compiled: bool):
    """If `compiled`, model and loss are given to `torch.compile`, which needs a C++ compiler."""
    torch.manual_seed(0)
    self.sizes = sizes
    self.model = Gpt(sizes._asdict() | {"fp8": False, "norm_epsilon": 1e-5, "init_std": 0.02})
    self.loss = torch.compile(self.model) if compiled else self.model
    # Rate, betas and decay are those of plain_gpt.py.
    self.optimizer = torch.optim.AdamW(
      self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    self.num_steps = 0

  @property
  def num_parameters(self) -> int:
    return sum(parameter.numel() for parameter in self.model.parameters())

  def step(self) -> float:
    """Takes one step on a fresh batch and returns the loss before it."""
    batch = random_batch(self.num_steps, self.sizes)
    loss = self.loss(*(torch.from_numpy(tokens).long() for tokens in batch))
    loss.backward()
    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    self.optimizer.step()
    self.optimizer.zero_grad(set_to_none=True)
    self.num_steps += 1
    return loss.item()
