# SPDX-License-Identifier: Apache-2.0
"""How torch trains in benchmarks/gpu.py and benchmarks/cpu.py: by AdamW, fused.

On GPUs it is compiled, with the fastest attention it has: left to itself torch takes
FlashAttention-2, which is slower than cuDNN on Hopper.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import gpu_timing
import torch
from torch.nn import attention

BACKENDS = [
  attention.SDPBackend.CUDNN_ATTENTION,
  attention.SDPBackend.FLASH_ATTENTION,
  attention.SDPBackend.MATH,
]


def run(make: Callable[[dict[str, Any], torch.device], torch.nn.Module], **versions: str):
  """Trains what `make` makes of the facts of a model, and tells.

  Args:
    make: Returns a module of (inputs, targets), int64 [B, T] both, whose result is the loss.
    **versions: Of more libraries.
  """
  task = gpu_timing.task()
  device = torch.device("cuda" if task.gpu else "cpu")
  torch.manual_seed(0)
  torch.set_float32_matmul_precision("high")
  module = make(task.facts, device)
  # On CPUs compiling would take longer than all else, and there is no speed to be told.
  loss_of: Any = torch.compile(module, mode=task.case["mode"]) if task.gpu else module
  training = Training(
    module, loss_of, task.facts, device, batch_size=task.case["batch"], casts=True
  )
  with attention.sdpa_kernel(BACKENDS, set_priority=True):
    times = gpu_timing.measure(training.step, training.wait, task)
  step = sorted(times.groups)[len(times.groups) // 2]
  gpu_timing.tell(
    **times._asdict(),
    first_loss=training.first_loss,
    last_loss=training.loss,
    compile_seconds=times.first_seconds - step if task.gpu else None,
    peak_bytes=torch.cuda.max_memory_allocated() if task.gpu else None,
    attention=attention_of(task.facts, device),
    dtypes=training.dtypes,
    parameters=sum(weight.numel() for weight in module.parameters()),
    versions={"torch": torch.__version__, **versions},
    device=torch.cuda.get_device_name() if task.gpu else "cpu",
    warnings=[] if task.gpu else ["not compiled"],
  )


class Training:
  """Steps of AdamW on random tokens; attributes as of gpu_ours.Run."""

  def __init__(
    self,
    module: torch.nn.Module,
    loss_of: Any,
    facts: dict[str, Any],
    device: torch.device,
    *,
    batch_size: int,
    casts: bool,
  ):
    """Makes the optimizer and the batches.

    Args:
      module: Has the weights.
      loss_of: (inputs, targets) -> the loss: the module, or what is compiled of it.
      facts: Of the model.
      device: Of the weights.
      batch_size: Sequences in a step.
      casts: Whether float32 weights are cast to bfloat16 (autocast).
    """
    self._device = device
    self._loss_of, self._clip_norm = loss_of, facts["clip_norm"]
    self._weights = [weight for weight in module.parameters() if weight.requires_grad]
    self._casts = casts and self._weights[0].dtype == torch.float32
    self._optimizer = torch.optim.AdamW(
      self._weights,
      lr=facts["learning_rate"],
      betas=tuple(facts["betas"]),
      eps=facts["epsilon"],
      weight_decay=facts["weight_decay"],
      fused=True,
    )
    wanted = facts["weight_dtype"], facts["moment_dtype"]
    if set(wanted) != {_name(self._weights[0])}:
      raise ValueError(f"torch has moments of the weights' dtype, not {' and '.join(wanted)}")
    shape = (gpu_timing.BATCHES, batch_size, facts["time"] + 1)
    tokens = torch.randint(facts["vocab"], shape, device=device)
    self._batches = itertools.cycle(
      (row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens
    )
    self._loss: Any = None
    self.first_loss: float | None = None

  def step(self):
    """Begins a step."""
    inputs, targets = next(self._batches)
    with torch.autocast(self._device.type, torch.bfloat16, enabled=self._casts):
      loss = self._loss_of(inputs, targets)
    loss.backward()
    if self._clip_norm is not None:
      torch.nn.utils.clip_grad_norm_(self._weights, self._clip_norm)
    self._optimizer.step()
    self._optimizer.zero_grad(set_to_none=True)
    self._loss = loss.detach()

  def wait(self):
    """Waits for the last step."""
    if self._device.type == "cuda":
      torch.cuda.synchronize()
    if self.first_loss is None:
      self.first_loss = self.loss

  @property
  def dtypes(self) -> str:
    """Those of trained weights and of the optimizer's moments."""
    moments = [state["exp_avg"] for state in self._optimizer.state.values()]
    return " / ".join(", ".join(sorted(set(map(_name, one)))) for one in (self._weights, moments))

  @property
  def loss(self) -> float:
    """That of the last step, in nats a token."""
    return float(self._loss)


def _name(tensor: torch.Tensor) -> str:
  return str(tensor.dtype).removeprefix("torch.")


def attention_of(facts: dict[str, Any], device: torch.device) -> str:
  """Returns what computes attention of these sizes, by the same question that torch asks."""
  if device.type != "cuda":
    return "cpu"
  shape = (1, facts["heads"], facts["time"], facts["head"])
  q = torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
  asked = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
  if torch.backends.cuda.can_use_cudnn_attention(asked):
    return "cudnn"
  return "flash" if torch.backends.cuda.can_use_flash_attention(asked) else "math"


@contextlib.contextmanager
def made_on(device: torch.device, dtype: torch.dtype):
  """Makes tensors on a device and of a dtype, where nothing else is said."""
  before = torch.get_default_dtype()
  torch.set_default_dtype(dtype)
  try:
    with device:
      yield
  finally:
    torch.set_default_dtype(before)
