# SPDX-License-Identifier: Apache-2.0
"""Training data with the predictions of a teacher, to be stored: see `data.prepared`."""

import functools
import json
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from paxlike.checkpoints.teacher import Teacher
from paxlike.data.dataset import Arrays, RowDataset
from paxlike.data.prepared import TOP_K
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.errors import UserError
from paxlike.layers.attention.auto import Place
from paxlike.layers.decoder import Batch, context_of
from paxlike.layers.module import Params
from paxlike.training import preflight
from paxlike.training.objectives import Gkd, OnPolicyGkd

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer


class TaughtRows(RowDataset):
  """The sequences of a trainer's data with the K most probable tokens of its teacher at each token.

  Attributes:
    record: What is recorded of the teacher: its folder, step and checksum, K and the temperature.
  """

  def __init__(self, trainer: "Trainer", *, top_k: int):
    """Restores the teacher onto the trainer's mesh.

    Raises:
      UserError: There is no teacher, its vocabulary is not that of the model, or K exceeds it.
    """
    objective, rows, devices = trainer.objective, trainer.train_data, trainer.devices
    teacher = getattr(objective, "teacher", None)
    if not isinstance(objective, Gkd) or not isinstance(teacher, Teacher):
      raise UserError("--teacher_top_k needs --fdl.TEACHER=DIR, a knob of the mixin Distillation.")
    if isinstance(objective, OnPolicyGkd):
      raise UserError("--teacher_top_k is for texts, and OnPolicyDistillation has prompts only.")
    assert isinstance(rows, RowDataset)
    preflight.check_teacher(trainer, teacher)
    most = min(trainer.model.vocab_size, teacher.model.vocab_size)
    if not 1 <= top_k <= most:
      raise UserError(f"--teacher_top_k={top_k} must be from 1 to the vocabulary's {most}.")
    self.seq_len, self.packed, self.segment_names = rows.seq_len, rows.packed, rows.segment_names
    self._rows, self._devices, self._objective, self._top_k = rows, devices, objective, top_k
    self._definition, self._vocab_size = teacher.definition, most
    self._placer = BatchPlacer(
      devices,
      batch_size=trainer.batch_size // trainer.accumulation_steps,
      seq_len=rows.seq_len,
      max_segments=teacher.model.max_segments(Place.on(devices)),
    )
    with jax.set_mesh(devices):
      self._params, record = teacher.load(devices)
    how = {"top_k": top_k, "temperature": objective.temperature}
    self.record: dict[str, Any] = json.loads(record) | how

  @property
  def tokenizer(self) -> Tokenizer | None:
    return self._rows.tokenizer

  @property
  def vocab_size(self) -> int | None:
    return self._rows.vocab_size

  @property
  def named(self) -> str:
    return self._rows.named

  def fingerprint(self) -> str:
    return f"{self._rows.fingerprint()} {json.dumps(self.record)}"

  def num_rows(self, epoch: int) -> int:
    return self._rows.num_rows(epoch)

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    arrays, size = self._rows.rows(epoch, numbers), self._placer.batch_size
    found: list[list[np.ndarray]] = []
    for first in range(0, len(numbers), size):
      part = {name: x[first : first + size] for name, x in arrays.items()}
      count = len(part["inputs"])
      # The last batch repeats a sequence, so that all have one shape.
      batch = {name: np.pad(x, ((0, size - count), (0, 0)), "edge") for name, x in part.items()}
      with jax.set_mesh(self._devices):
        top = self._predict(self._params, self._placer.put(batch))
      found.append([np.asarray(x)[:count] for x in top])
    return arrays | dict(zip(TOP_K, map(np.concatenate, zip(*found, strict=True)), strict=True))

  @functools.cached_property
  def _predict(self) -> Any:
    def chosen(logits_BTV: jax.Array, arrays: Any) -> tuple[jax.Array, jax.Array]:
      del arrays
      logs_BTV = self._objective.log_probabilities(logits_BTV[..., : self._vocab_size])
      values_BTK, ids_BTK = jax.lax.top_k(logs_BTV, self._top_k)
      return ids_BTK, values_BTK

    def predict(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
      model = self._definition.bind(params)
      x_BTD, _, _ = model.hidden(batch["inputs"], context_of(batch))
      return model.map_logits(chosen, x_BTD, ())

    return jax.jit(predict)
