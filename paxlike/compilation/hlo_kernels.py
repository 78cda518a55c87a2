# SPDX-License-Identifier: Apache-2.0
"""A roofline estimate of the kernels of a program that XLA compiled for a GPU, a TPU or a CPU.

It parses the optimised HLO text, in which every launch is one instruction, and multiplies by the
trip counts of loops. A kernel takes the larger of bytes / bandwidth and FLOPs / rate, plus a
launch; overlap is not modelled. Differences below 5 % between two estimates mean nothing.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlike.compilation.hlo_text import COLLECTIVES, Instruction, Shape, computations
from paxlike.devices import kernel_rates
from paxlike.devices.chips import Chip
from paxlike.devices.kernel_rates import KernelRates

# Instructions without a kernel: names of values, and -done halves of asynchronous instructions.
_FREE = {
  *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id"),
  *("opt-barrier", "replica-id"),
}
_BUFFERS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
_VECTOR = 1  # The memory space of TPUs' vector memory.
#: Instructions that run other computations.
BRANCHES = ("while", "call", "conditional", "async-start")


class HloKernel(NamedTuple):
  """The kernel of one instruction.

  Attributes:
    group: matmul, matmul fp8, matmul int8, matmul tf32 (f32 on CPUs), attention, transpose
      (including copies to another layout), communication, or memory (all other memory-bound
      kernels).
    kind: Its label in tables.
    count: Launches per run of the program.
    nbytes: Bytes read and written per launch.
    flops: FLOPs per launch.
    seconds: Roofline time per launch.
    source: The `op_name` that JAX gave the operation, else that of an operand.
    name: The name of the instruction.
  """

  group: str
  kind: str
  count: int
  nbytes: float
  flops: float
  seconds: float
  source: str
  name: str = ""


class _Work(NamedTuple):
  """The work of a kernel; `rate` is the FLOP/s at which it computes, 0: memory-bound."""

  group: str
  kind: str
  nbytes: float
  flops: float = 0.0
  rate: float = 0.0


def kernels(program: str, chip: Chip, rates: KernelRates | None = None) -> list[HloKernel]:
  """Returns the kernels of a compiled program, in order.

  Args:
    program: The HLO text, `compiled.as_text()`.
    chip: The chip it was compiled for.
    rates: The rates that kernels reach; None: those of `kernel_rates` for this chip.
  """
  return list(_Reader(program, chip, rates or kernel_rates.of_chip(chip)).kernels("", 1))


class _Reader:
  def __init__(self, program: str, chip: Chip, rates: KernelRates):
    self._computations = computations(program)
    self._chip = chip
    self._rates = rates

  def kernels(self, computation: str, count: int) -> Iterator[HloKernel]:
    """Yields the kernels of a computation that runs `count` times."""
    shapes: dict[str, list[Shape]] = {}
    sources: dict[str, str] = {}
    for one in self._computations.get(computation, ()):
      shapes[one.name] = one.outputs
      sources[one.name] = source = one.op_name or next(
        (sources[name] for name in one.operands if sources.get(name)), ""
      )
      if one.operation in _FREE or one.operation.endswith("-done") or self._is_free_on_tpus(one):
        continue
      if one.operation in BRANCHES:
        for called in one.called:
          yield from self.kernels(called, count * one.times(self._computations))
        continue
      operands = [shape for name in one.operands for shape in shapes.get(name, ())]
      work = self._work(one, operands, source)
      seconds = max(
        work.nbytes / self._rates.memory_bandwidth(self._chip),
        work.flops / work.rate if work.rate else 0.0,
      )
      yield HloKernel(
        work.group,
        work.kind,
        count,
        work.nbytes,
        work.flops,
        seconds + self._rates.launch,
        source,
        one.name,
      )

  def _work(self, one: Instruction, operands: Sequence[Shape], source: str) -> _Work:
    arrays, operands, outputs = operands, self._in_memory(operands), self._in_memory(one.outputs)
    moved = sum(shape.nbytes for shape in (*operands, *outputs))
    if one.target.startswith("__cublas"):
      return self._matmul(one, operands)
    if one.target == "__cudnn$blockScaledDot":
      return self._block_scaled(one, operands, moved)
    if "/grouped_matmul/" in one.attributes and one.target.endswith("triton"):
      return self._grouped_matmul(one, operands, moved, _share_in_groups(source))
    if one.target == "tpu_custom_call" and "/ragged_dot" in one.attributes:
      # The last operands are tokens and matrices or, for the gradient of these, tokens twice.
      rows, output, share = arrays[-2], one.outputs[0], _share_in_groups(source)
      groups = next((a.dims[0] for a in (output, arrays[-1]) if len(a.dims) == 3), 1)
      flops = 2.0 * math.prod(rows.dims) * output.dims[-1] * share
      return self._ragged(one, moved, flops, rows.dims[0] * share / groups)
    if one.target == "tpu_custom_call" and "splash" in one.name:
      return self._splash(one, arrays, moved)
    if one.operation == "convolution":
      return self._convolution(one, moved, _convolution_flops(one, arrays))
    if "fmha" in one.target:
      return self._attention(one, operands, moved)
    if one.operation.startswith(COLLECTIVES):
      return _Work("communication", one.operation.removesuffix("-start"), moved)
    if one.operation == "dot":  # Only on CPUs.
      return self._matmul(one, operands)
    if one.operation.startswith("copy"):
      return _Work("transpose" if _is_transpose(one, operands) else "memory", "copy", moved)
    body = self._computations.get(one.called[0], []) if one.called else []
    if not body:
      return _Work("memory", one.target or one.operation, moved)
    nbytes = _fusion_bytes(body, operands, outputs)
    if not self._chip.is_gpu and not _updates_in_place(body) and len(arrays) == len(one.operands):
      read = [self._read(body, place, array) for place, array in enumerate(arrays)]
      nbytes = sum(shape.nbytes for shape in outputs) + sum(read)
    if not self._chip.is_gpu and (flops := self._fused_flops(body)):
      mask = next((a.dims for a in arrays if a.dtype == "pred" and len(a.dims) == 2), None)
      if mask and re.search(r"SKIPPER_MODE_(GROUP_STARTS|ITERATION_INDICES)", one.attributes):
        # Each group is a matmul of all tokens, of which the kernel skips those that the mask hides.
        groups, tokens = mask
        share = _share_in_groups(source) / groups
        return self._ragged(one, nbytes, flops * share, tokens * share)
      return self._convolution(one, nbytes, flops)
    group, name = "memory", re.sub(r"[.0-9]+$", "", one.name)
    shapes = {inner.name: inner.outputs for inner in body}
    for inner in body:
      used = [shape for name in inner.operands for shape in shapes[name]]
      # XLA wraps a matmul that reads or writes slices into a fusion. Triton matmuls are fusions
      # that may convert their operands.
      if inner.target.startswith("__cublas"):
        return self._matmul(inner, used)
      if inner.operation == "dot":
        return self._matmul(inner, used)._replace(nbytes=nbytes)
      if _is_transpose(inner, used):
        group = "transpose"
    return _Work(group, name, nbytes)

  def _matmul(self, one: Instruction, operands: Sequence[Shape]) -> _Work:
    a, b, output = operands[0], operands[1], one.outputs[0]
    contracted = re.search(
      r'(?:"lhs_contracting_dimensions":\s*\["?|lhs_contracting_dims=\{)(\d+)', one.attributes
    )
    depth = a.dims[int(contracted[1])] if contracted else a.dims[-1]
    group, dtype = self._class("f8" if "$f8" in one.target else a.dtype)
    *batch, rows, columns = (1, 1, *output.dims)
    rows *= math.prod(batch)
    rate = self._rates.matmul_flops(self._chip, rows, columns, depth, dtype=dtype)
    epilogue = re.search(r'"epilogue":\s*"([A-Z_]+)"', one.attributes)
    kind = f"{'x'.join(map(str, output.dims))} over {depth}, {a.dtype} to {output.dtype}"
    if one.operation == "dot" and self._chip.is_gpu:
      kind += ", Triton"
    if epilogue and epilogue[1] != "DEFAULT":
      kind += f", {epilogue[1]}"
    # The third operand is a bias or an accumulator; for FP8, a scale.
    nbytes = a.nbytes + b.nbytes + output.nbytes
    nbytes += sum(shape.nbytes for shape in operands[2:3])
    return _Work(group, kind, nbytes, 2.0 * math.prod(output.dims) * depth, rate)

  def _block_scaled(self, one: Instruction, operands: Sequence[Shape], moved: float) -> _Work:
    (*_, depth), output = operands[0].dims, one.outputs[0]
    group, dtype = self._class("f8")
    rows, columns = (1, 1, *output.dims)[-2:]
    rate = self._rates.matmul_flops(self._chip, rows, columns, depth, dtype=dtype)
    kind = f"{'x'.join(map(str, output.dims))} over {depth}, MXFP8 to {output.dtype}"
    return _Work(group, kind, moved, 2.0 * math.prod(output.dims) * depth, rate)

  def _grouped_matmul(
    self, one: Instruction, operands: Sequence[Shape], moved: float, share: float
  ) -> _Work:
    """Returns the work of `grouped_matmul_triton` if `share` of the tokens are in a group."""
    tokens, output = operands[-2], one.outputs[0]
    # These kernels multiply FP8 operands in bfloat16.
    group, dtype = self._class("bf16" if tokens.dtype.startswith("f8") else tokens.dtype)
    rows, depth = math.prod(tokens.dims[:-1]), tokens.dims[-1]
    rate = self._rates.matmul_flops(self._chip, rows, output.dims[-1], depth, dtype=dtype)
    rate *= self._rates.grouped
    kind = f"grouped {'x'.join(map(str, output.dims))} of {'x'.join(map(str, tokens.dims))}"
    flops = 2.0 * math.prod(tokens.dims) * share * output.dims[-1]
    return _Work(group, f"{kind}, {tokens.dtype} to {output.dtype}, Triton", moved, flops, rate)

  def _is_free_on_tpus(self, one: Instruction) -> bool:
    """Returns whether an instruction only names a buffer, or loads one beside computation."""
    loads = one.operation.endswith("-start") and not one.operation.startswith(
      (*COLLECTIVES, *BRANCHES)
    )
    return not self._chip.is_gpu and (loads or one.target in _BUFFERS)

  def _in_memory(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
    """Returns the arrays that are in the device's memory."""
    return shapes if self._chip.is_gpu else [shape for shape in shapes if shape.space != _VECTOR]

  def _read(self, body: Sequence[Instruction], place: int, operand: Shape) -> int:
    """Returns the bytes that a fusion reads of its operand at `place`: of slices alone, if all are.

    The TPU compiler nests fusions.
    """
    if operand.space == _VECTOR:
      return 0
    names, total = set[str](), 0
    for one in body:
      if one.operation == "parameter" and one.literal == str(place):
        names.add(one.name)
      if names.isdisjoint(one.operands):
        continue
      if one.operation == "bitcast":
        names.add(one.name)
      elif one.operation in ("dynamic-slice", "gather") and names.isdisjoint(one.operands[1:]):
        total += one.outputs[0].nbytes
      elif one.operation == "fusion":
        inside = self._computations.get(one.called[0], ())
        places = [n for n, name in enumerate(one.operands) if name in names]
        total += sum(self._read(inside, n, operand) for n in places)
      else:
        return operand.nbytes
    return min(total, operand.nbytes)

  def _fused_flops(self, body: Sequence[Instruction]) -> float:
    """Returns the FLOPs of the matmuls in a fusion, which are convolutions on TPUs."""
    shapes = {one.name: one.outputs for one in body}
    total = 0.0
    for one in body:
      if one.operation == "convolution":
        total += _convolution_flops(one, [s for name in one.operands for s in shapes[name]])
      elif one.operation == "fusion":
        for name in one.called:
          total += self._fused_flops(self._computations.get(name, ()))
    return total

  def _convolution(self, one: Instruction, nbytes: float, flops: float) -> _Work:
    output = max(one.outputs, key=lambda shape: shape.nbytes)
    dtype = {"s32": "s8"}.get(output.dtype, "bf16")
    group, name = self._class(dtype)
    unit = self._chip.matrix  # As if no dim were padded.
    rate = self._rates.matmul_flops(self._chip, unit, unit, unit, dtype=name)
    kind = f"{'x'.join(map(str, output.dims))}, to {output.dtype}"
    return _Work(group, kind, nbytes, flops, rate)

  def _ragged(self, one: Instruction, nbytes: float, flops: float, tokens: float) -> _Work:
    """Returns the work of a ragged matmul on a TPU; `tokens` is the mean number in a group."""
    work = self._convolution(one, nbytes, flops)
    rate = work.rate * self._rates.ragged_share(tokens)
    return work._replace(kind=f"grouped {work.kind}", rate=rate)

  def _splash(self, one: Instruction, operands: Sequence[Shape], moved: float) -> _Work:
    """Returns the work of a kernel of splash attention, whose causal blocks count."""
    queries = next((shape for shape in operands if len(shape.dims) == 4), None)
    if queries is None:
      return _Work("memory", one.name, moved)
    batch, heads, tokens, head_dim = queries.dims
    is_backward = "_fwd" not in one.name
    # Of the backward pass' seven matmuls, two compute again what the other kernel has.
    share = 1.0 if not is_backward else 4 / 7 if "dkv" in one.name else 3 / 7
    flops = (5 if is_backward else 2) * share * batch * heads * tokens * tokens * head_dim
    rate = self._rates.attention_flops(self._chip, tokens, head_dim, backward=is_backward)
    return _Work("attention", re.sub(r"[.0-9]+$", "", one.name), moved, flops, rate)

  def _class(self, dtype: str) -> tuple[str, str]:
    """Returns the group of matmuls in a dtype of XLA, and the dtype as `KernelRates` has it."""
    return {
      "f8": ("matmul fp8", "fp8"),
      "s8": ("matmul int8", "int8"),
      "f32": ("matmul tf32" if self._chip.is_gpu else "matmul f32", "float32"),
    }.get(dtype, ("matmul", "bfloat16"))

  def _attention(self, one: Instruction, operands: Sequence[Shape], moved: float) -> _Work:
    batch, *middle, head_dim = operands[0].dims
    heads, tokens = sorted(middle)
    is_backward = "Backward" in one.target
    window = re.search(r'"sliding_window_length":\s*(\d+)', one.attributes)
    seen = min(int(window[1]) if window and int(window[1]) else tokens, tokens)
    pairs = batch * heads * seen * (tokens - seen / 2)  # Causal pairs.
    if not (causal := "CAUSAL" in one.attributes):
      pairs = batch * heads * tokens * tokens
    rate = self._rates.attention_flops(
      self._chip, seen, head_dim, backward=is_backward, causal=causal
    )
    # Two matmuls forward; five backward, one of them recomputes the logits.
    return _Work(
      "attention", one.target, moved, 2 * (5 if is_backward else 2) * pairs * head_dim, rate
    )


def _share_in_groups(source: str) -> float:
  """Returns the expected share of a grouped matmul's tokens that are in groups of this device."""
  found = re.search(r"/groups_(\d+)_of_(\d+)/", source)
  return int(found[1]) / int(found[2]) if found else 1.0


def _convolution_flops(one: Instruction, operands: Sequence[Shape]) -> float:
  """Returns the FLOPs of a convolution, without products with padding.

  The TPU compiler turns batch dims of matmuls into dims of a window with padding.
  """
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
  assert labels is not None
  (image, kernel), output = operands[:2], one.outputs[0]
  sizes = [
    dict(zip(names, shape.dims, strict=True))
    for names, shape in zip(labels.groups(), (image, kernel, output), strict=True)
  ]
  window = dict(
    re.findall(r"(\w+)=([\w\-]+)", one.attributes.partition("window={")[2].split("}")[0])
  )
  products = 1.0
  for place, label in enumerate(sorted(name for name in sizes[0] if name.isdigit())):

    def given(name: str, default: str, place: int = place) -> str:
      return window[name].split("x")[place] if name in window else default

    low = int(given("pad", "0_0").split("_")[0])
    stride, over, dilation = (int(given(n, "1")) for n in ("stride", "lhs_dilate", "rhs_dilate"))
    at = np.arange(sizes[2][label])[:, None] * stride - low
    at = at + np.arange(sizes[1][label]) * dilation
    reached = (at >= 0) & (at <= (sizes[0][label] - 1) * over) & (at % over == 0)
    products *= int(reached.sum())
  features = sizes[1]["i"] * sizes[1]["o"]
  groups = re.search(r"batch_group_count=(\d+)", one.attributes)
  return 2.0 * sizes[0]["b"] * features * products / (int(groups[1]) if groups else 1)


def _fusion_bytes(
  body: Sequence[Instruction], operands: Sequence[Shape], outputs: Sequence[Shape]
) -> float:
  """Returns about how many bytes a fusion reads and writes.

  Of arrays that it updates in place, only the slices count. If it slices any, an operand counts at
  most twice the largest output.
  """
  operations = {one.operation for one in body}
  written = sum(shape.nbytes for shape in outputs)
  largest = max((shape.nbytes for shape in outputs), default=0)
  if _updates_in_place(body):
    parts = [shape.nbytes for shape in operands if shape.nbytes < largest / 2]
    return 2 * sum(parts) if parts else written
  if operations & {"dynamic-slice", "gather"}:
    return written + sum(min(shape.nbytes, 2 * largest) for shape in operands)
  return written + sum(shape.nbytes for shape in operands)


def _updates_in_place(body: Sequence[Instruction]) -> bool:
  """Returns whether an output of a fusion is an updated slice of an array, maybe converted."""
  by_name = {one.name: one for one in body}
  root = body[-1]
  for name in root.operands if root.operation == "tuple" else (root.name,):
    one = by_name.get(name)
    while one is not None and one.operation in ("bitcast", "convert", "copy"):
      one = by_name.get(one.operands[0])
    if one is not None and one.operation == "dynamic-update-slice":
      return True
  return False


def _is_transpose(one: Instruction, operands: Sequence[Shape]) -> bool:
  """Returns whether an instruction changes the memory layout of an array."""
  if one.operation == "transpose":
    return True
  before = [shape.layout for shape in operands]
  return one.operation.startswith("copy") and before != [one.outputs[0].layout]


def grouped(found: Sequence[HloKernel], field: str) -> list[tuple[str, HloKernel]]:
  """Returns kernels summed by the value of `field`, longest total time first."""
  groups: dict[str, list[HloKernel]] = {}
  for kernel in found:
    groups.setdefault(getattr(kernel, field), []).append(kernel)
  sums = {value: total(kernels) for value, kernels in groups.items()}
  return sorted(sums.items(), key=lambda item: -item[1].seconds)


def total(found: Sequence[HloKernel]) -> HloKernel:
  """Returns the sum of kernels over a run of the program."""

  def add(field: str) -> Any:
    return sum(kernel.count * getattr(kernel, field) for kernel in found)

  last = found[-1]
  launches = sum(kernel.count for kernel in found)
  return HloKernel(
    last.group, last.kind, launches, add("nbytes"), add("flops"), add("seconds"), last.source
  )
