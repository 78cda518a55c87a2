# SPDX-License-Identifier: Apache-2.0
"""The trainer: restores or initializes a run, trains it, and logs, evaluates and saves."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath

from paxlike.checkpoints.checkpoint import Checkpoints, flatten
from paxlike.checkpoints.committing import check_keep
from paxlike.checkpoints.warm_start import Restore
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import Dataset
from paxlike.data.tuning import dialogue
from paxlike.data.tuning.dialogue import Dialogue
from paxlike.devices import malloc, mesh
from paxlike.devices.batch_placement import Feed
from paxlike.errors import UserError
from paxlike.inference import conversation, decoding
from paxlike.inference.sampling import Sampling
from paxlike.layers import flops
from paxlike.layers.attention.auto import Place
from paxlike.layers.decoder import Batch, Decoder
from paxlike.layers.module import Definition, Params
from paxlike.layers.stack import layout_of
from paxlike.processes import progress, watch
from paxlike.processes.signals import StopSignal
from paxlike.telemetry.meter import Meter, Reading, check_finite
from paxlike.telemetry.run_log import Journal, Summary
from paxlike.training import preflight, requirements, train_state
from paxlike.training.best_checkpoint import Best, Criterion
from paxlike.training.evaluation import EvalSet, Evaluator, Result, Stopped
from paxlike.training.initial_state import Origin
from paxlike.training.objectives import NextToken, Objective, shares_base
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState
from paxlike.training.train_step import make_train_step


@configurable
@dataclasses.dataclass(kw_only=True)
class Trainer:
  """One run: its configuration, training, evaluation and decoding.

  Building it allocates and reads nothing.

  Attributes:
    model: The model, with abstract weights.
    optimizer: The optimizer with its schedule.
    mesh: The shape of the device mesh.
    train_data: The training data; None to evaluate only.
    eval_data: Eval sets by name; folders of results have the same names.
    percore_batch_size: Sequences per device and optimizer step.
    accumulation_steps: Gradient-accumulation microbatches per optimizer step.
    num_steps: Optimizer steps of the run.
    seed: Seed of weights and dropout.
    summary_every: Steps between log lines.
    eval_every: Steps between evaluations; 0: only after the last step.
    save_every: Steps between checkpoints; 0: only after the last step.
    keep: Number of newest checkpoints to keep; None: all.
    max_skipped_in_a_row: Number of consecutive non-finite steps that ends the run.
    sample_prompt: Text that the trained model continues at the end.
    restore: Source of a new run's initial weights; None: all are initialized.
    best: Criterion of the best checkpoint; None: none is kept.
    objective: The training objective.
    trained: Pattern (`re.search`) of the trained weights; the others are frozen.
    weight_dtype: Storage dtype of trained weights; bfloat16 uses stochastic rounding.
    stall_timeout: Seconds without progress that end the job; None: derived; 0: no limit.
    stack_interval: Seconds between dumps of all threads' stacks; None: no dumps.
    read_only: Whether nothing is trained, so that weights with a scheme are stored quantized.
    saving: Whether checkpoints are written.
    compiler_options: XLA's, for the step, evaluation and decoding. Set after building, because
      options that write files do not belong in a graph.
    compiled_step: A step compiled ahead of time, also set after building; None: no such step.
  """

  model: Decoder
  optimizer: Optimizer
  mesh: mesh.MeshSpec
  train_data: Dataset | None
  eval_data: Mapping[str, EvalSet]
  percore_batch_size: ranges.Batch
  accumulation_steps: ranges.Size
  num_steps: ranges.NonNegative
  seed: ranges.NonNegative
  summary_every: ranges.Positive
  eval_every: ranges.NonNegative
  save_every: ranges.NonNegative
  keep: ranges.Positive | None
  max_skipped_in_a_row: ranges.Positive
  sample_prompt: str | None = None
  restore: Restore | None = None
  best: Criterion | None = None
  objective: Objective = dataclasses.field(default_factory=NextToken)
  trained: str = ""
  weight_dtype: Literal["float32", "bfloat16"] = "float32"
  stall_timeout: ranges.Seconds | None = None
  stack_interval: ranges.Interval | None = None
  read_only: bool = False
  saving: bool = True
  compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, init=False)
  compiled_step: jax.stages.Compiled | None = dataclasses.field(default=None, init=False)

  def check(self, *, training: bool = True):
    """Checks the run before anything is computed or written.

    Raises:
      UserError: The mesh, the batch or a data set is invalid.
    """
    check_keep(self.keep)
    preflight.check(self, training=training)

  def check_prompts(self, prompts: Sequence[decoding.Prompt], *, stop_tokens: Sequence[int] = ()):
    """Checks that the model can continue `prompts`, and that `stop_tokens` are in its vocabulary.

    Raises:
      UserError: It cannot, or they are not.
    """
    how: Any = {"max_len": self.data.seq_len, "stop_tokens": stop_tokens}
    decoding.check(prompts, self.model, self.data.tokenizer, self._dialogue(prompts), **how)

  @functools.cached_property
  def definition(self) -> Definition:
    """The model as weight specs and a pure function."""
    return Definition(
      self.model, trained=self.trained, dtype=self.weight_dtype, read_only=self.read_only
    )

  @property
  def has_reference(self) -> bool:
    """Whether a step needs a copy of the initial weights, as a reference model."""
    return self.objective.needs_reference and not shares_base(self.definition)

  def origin(self, folder: epath.Path) -> Origin:
    """Returns the source of the state and weights of the run in `folder`."""
    return Origin(
      folder=folder,
      definition=self.definition,
      devices=self.devices,
      seed=self.seed,
      restore=self.restore,
    )

  @functools.cached_property
  def feed(self) -> Feed:
    """Places batches on the devices."""
    return Feed(
      self.devices,
      batch_size=self.batch_size,
      seq_len=self.data.seq_len,
      max_segments=self.model.max_segments(Place.on(self.devices)),
    )

  @functools.cached_property
  def devices(self) -> jax.sharding.Mesh:
    """The device mesh.

    Raises:
      UserError: The number of devices does not fit the mesh, or they do not support the model.
    """
    devices = self.mesh.build()
    requirements.check(self.model, list(devices.devices.flat))
    return devices

  @property
  def attention(self) -> list[str]:
    """Names of the attention kernels in use."""
    is_packed = any("segments" in data.no_rows() for data in self.datasets())
    return self.model.kernels(Place.on(self.devices), is_packed=is_packed)

  @property
  def compute_dtype(self) -> str:
    """Compute dtype of layers, except routers, statistics and the loss."""
    return str(jnp.dtype(self.model.embedding.dtype))

  @property
  def data(self) -> Any:
    """The training data, or else the data of the first eval set."""
    if datasets := self.datasets():
      return datasets[0]
    raise UserError("this experiment has no data, neither train_data nor eval_data.")

  def datasets(self, *, training: bool = True) -> list[Any]:
    """Returns the training data, if any and if `training`, and the data of all eval sets."""
    of_training = [self.train_data] if training and self.train_data is not None else []
    return of_training + [eval_set.dataset for eval_set in self.eval_data.values()]

  @property
  def batch_size(self) -> int:
    """Sequences per optimizer step, over all devices."""
    return mesh.global_batch_size(
      percore=self.percore_batch_size,
      num_devices=self.devices.size,
      accumulation_steps=self.accumulation_steps,
    )

  def train(self, folder: epath.Path, journal: Journal, *, files: Mapping[str, Any]) -> int:
    """Trains from the newest checkpoint in `folder`, or from the start, to `num_steps`.

    Args:
      folder: The run's folder; created if missing.
      journal: Logs progress.
      files: Name -> text of files for the folder, written after the state is restored.

    Returns:
      The signal that ended the run early, else 0.

    Raises:
      UserError: The checkpoint is of another experiment, or cannot be written.
      RunError: The loss is no longer finite.
    """
    best = Best(folder, self.best, saving=self.saving)
    with (
      jax.set_mesh(self.devices),
      self.watched(folder),
      self._checkpoints(folder, best, journal) as saved,
      StopSignal() as stop,
    ):
      state, data_state, origin = self.origin(folder).state(saved, self.optimizer, journal)
      start = int(state.step)
      if journal.is_past(start, num_steps=self.num_steps):
        return 0
      best.forget(after=start)
      if self.has_reference:
        state = dataclasses.replace(state, reference=self.origin(folder).reference(state))
      train_step = None
      meter = Meter(depth=self.feed.steps_in_flight)
      progress.enter("data", start)
      given: Any = {"rows": self.feed.rows, "state": data_state, "updates": start}
      with self.data.batches(self.batch_size, **given) as batches, watch.reporting():
        # All checks come before the first write.
        first = [next(batches)] if start < self.num_steps else []
        batches = itertools.chain(first, batches)
        journal.start(self._summary, {**files, **origin}, step=start, num_steps=self.num_steps)
        owed = self._evaluates_after(start) and best.owes(start, self.eval_data)
        if owed:  # The run was stopped before or during that evaluation.
          self._judge(best, state.weights, start, journal, stop)
        stopping = owed and stop.requested()
        for step in range(start, self.num_steps):
          if stopping or best.is_hopeless:
            break
          progress.enter("data", step)
          batch = next(batches)
          progress.enter("dispatch", step)
          arrays = self.feed.put(batch.arrays)
          if train_step is None:
            progress.enter("compile")
            train_step = self._compile_first(state, arrays, journal)
            progress.enter("dispatch", step)
          state, metrics = train_step(state, arrays)
          progress.enter("step", step)
          self._log(meter.add(step, metrics), journal)

          stopping = stop.requested()
          ending = stopping or step + 1 == self.num_steps
          save = self.saving and (ending or _due(step, self.save_every))
          evaluate = not stopping and self._evaluates_after(step + 1)
          if save or evaluate:
            self._log(meter.flush(), journal)
            meter.pause()
          if save:
            self._save(saved, state, batch.state)
            journal.status("running", step + 1)
          if evaluate:
            keep = self._judge(best, state.weights, step + 1, journal, stop)
            stopping = stop.requested()
            if (keep or stopping) and self.saving and not save:
              self._save(saved, state, batch.state)
      self._log(meter.flush(), journal)
      progress.enter("save", int(state.step))
      saved.wait()
      progress.enter("end")
      self._finish(state, journal, best, has_progressed=owed or int(state.step) > start)
      return stop.number or 0

  def evaluate(self, folder: epath.Path, journal: Journal, *, step: int | None) -> int:
    """Evaluates checkpoint `step`, or the newest, on every eval set. Returns its step.

    Raises:
      UserError: There is nothing to evaluate, or it is of another experiment.
    """
    _ = self.evaluators  # Raises if there is no evaluation data.
    with jax.set_mesh(self.devices), self.watched(folder):
      step, params = self.origin(folder).params(step)
      self._evaluate(params, step, journal)
      return step

  def decode(
    self,
    folder: epath.Path,
    journal: Journal,
    prompts: Sequence[decoding.Prompt],
    *,
    step: int | None,
    options: decoding.Options,
  ):
    """Continues `prompts` with checkpoint `step`, or the newest, and prints and saves the texts.

    Without prompts, holds a conversation in the terminal.

    Raises:
      UserError: There is no such checkpoint, it is of another experiment, or has no tokenizer.
    """
    if not prompts:
      conversation.check()
    self.check_prompts(prompts or conversation.EXAMPLE, stop_tokens=options.stop_tokens)
    with jax.set_mesh(self.devices), self.watched(folder):
      step, params = self.origin(folder).params(step)
      decoder = self._decoding(params, options, self._dialogue(prompts or conversation.EXAMPLE))
      if not prompts:
        conversation.hold(decoder, journal.piece)
        return
      path = folder / "decode_out" / f"decode_{step:08d}.jsonl"
      decoding.tell(decoder, prompts, journal, path)

  def watched(self, folder: epath.Path | None = None) -> Any:
    """Returns a context in which the run is watched for progress."""
    return watch.over(watch.Limits(folder, self.stall_timeout, self.stack_interval))

  def _decoding(
    self, params: Params, options: decoding.Options, dialogue: Dialogue | None = None
  ) -> decoding.Decoding:
    return decoding.Decoding(
      self.definition,
      params,
      self.data.tokenizer,
      max_len=self.data.seq_len,
      options=options,
      dialogue=dialogue,
      compiler_options=self.compiler_options,
    )

  def _dialogue(self, prompts: Sequence[decoding.Prompt]) -> Dialogue | None:
    has_talk = any(not isinstance(prompt, str) for prompt in prompts)
    return self.data.dialogue or (dialogue.beside(self.data.tokenizer) if has_talk else None)

  def load(self, folder: epath.PathLike, *, step: int | None = None) -> Params:
    """Returns the weights of checkpoint `step`, or the newest, in the dtypes of the layers.

    Raises:
      UserError: There is no such checkpoint, or it is of another experiment.
    """
    with jax.set_mesh(self.devices):
      return self.origin(epath.Path(folder)).params(step)[1]

  def _checkpoints(self, folder: epath.Path, best: Best, journal: Journal) -> Checkpoints:
    return self.origin(folder).checkpoints(
      keep=self.keep,
      preserved=lambda: best.step,
      check_owner=journal.check_owner,
      on_commit=journal.saved,
    )

  def _evaluates_after(self, step: int) -> bool:
    at_end = step == self.num_steps
    return bool(step and self.eval_data) and (at_end or _due(step - 1, self.eval_every))

  def _judge(self, best: Best, params: Params, at: int, journal: Journal, stop: StopSignal) -> bool:
    """Evaluates weights unless stopped; returns whether the result requires a checkpoint."""
    with contextlib.suppress(Stopped):
      results = self._evaluate(params, at, journal, stops=stop.requested)
      return best.evaluated(results, at) or best.is_hopeless
    return False

  def _evaluate(self, params: Params, step: int, journal: Journal, **how: Any) -> dict[str, Result]:
    """Evaluates weights on each eval set and logs the results; `how` is for `Evaluator.run`."""
    results = {}
    for name, evaluator in self.evaluators.items():
      results[name] = evaluator.run(params, name=name, **how)
      journal.evaluated(name, step, results[name].values, results[name].records)
    return results

  @functools.cached_property
  def evaluators(self) -> dict[str, Evaluator]:
    """The evaluator of each eval set, by name.

    Raises:
      UserError: There is no eval set.
    """
    if not self.eval_data:
      raise UserError("this experiment has no evaluation data (eval_data).")
    return {
      name: Evaluator(
        self.definition,
        eval_set,
        self.feed,
        batch_size=self.batch_size,
        compiler_options=self.compiler_options,
      )
      for name, eval_set in self.eval_data.items()
    }

  def _save(self, saved: Checkpoints, state: TrainState, data_state: dict[str, Any]):
    progress.enter("save", int(state.step))
    changing = flatten(dataclasses.replace(state, frozen={}, reference={}))
    saved.save(int(state.step), changing, layout=layout_of(self.model), train_input=data_state)

  def _finish(self, state: TrainState, journal: Journal, best: Best, *, has_progressed: bool):
    step = int(state.step)
    owes = self._evaluates_after(step) and best.owes(step, self.eval_data)
    finished = best.is_hopeless or (step == self.num_steps and not owes)
    if best.is_hopeless and step < self.num_steps:
      journal.note(f"stopped early: checkpoint {best.step} is still the best")
    if finished and has_progressed and self.sample_prompt is not None:
      how = decoding.Options(max_new_tokens=200, sampling=Sampling(temperature=0.8), seed=self.seed)
      *_, last = self._decoding(state.weights, how).run([self.sample_prompt])
      journal.note(f"sample:\n{self.sample_prompt}{last.text}")
    journal.status("finished" if finished else "stopped", step)

  @functools.cached_property
  def _step(self) -> Any:
    step = make_train_step(
      self.definition,
      self.optimizer,
      seed=self.seed,
      num_microbatches=self.accumulation_steps,
      objective=self.objective,
      sources=self.data.sources,
    )
    return jax.jit(step, donate_argnums=0)

  def abstract(self) -> tuple[Any, Any]:
    """Returns the shapes, dtypes and shardings of the run's state and of its batches."""
    state = train_state.abstract(
      self.definition, self.optimizer, self.devices, with_reference=self.has_reference
    )
    return state, self.feed.abstract(self.data.no_rows())

  def trace(self):
    """Traces initialization and a step, so that errors appear early; JAX caches both."""
    with jax.set_mesh(self.devices):
      train_state.trace_init(self.definition, self.devices)
      self._step.trace(*self.abstract())

  def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
    """Returns the lowered step for arrays like these, which may be abstract."""
    return self._step.lower(state, batch)

  def compile(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
    """Returns the compiled step for arrays like these."""
    if self.compiled_step is not None:
      return self.compiled_step
    return self.lower(state, batch).compile(compiler_options=dict(self.compiler_options))

  def _compile_first(
    self, state: TrainState, batch: Batch, journal: Journal
  ) -> jax.stages.Compiled:
    began = time.perf_counter()
    program = self.compile(state, batch)
    if self.compiled_step is None:
      journal.note(f"compiled the step in {time.perf_counter() - began:.1f} s")
    malloc.return_freed_heap()
    return program

  def _log(self, readings: Iterable[Reading], journal: Journal):
    for reading in readings:
      journal.step(reading, due=_due(reading.step, self.summary_every))
      check_finite(reading, journal.skipped_in_a_row, most=self.max_skipped_in_a_row)

  @property
  def _summary(self) -> Summary:
    return Summary(
      num_params=self.definition.num_params,
      num_trained=self.definition.num_trained,
      batch_size=self.batch_size,
      seq_len=self.data.seq_len,
      epoch_rows=self.data.epoch_rows,
      devices=self.devices,
      flops=flops.per_token(self.definition, self.data.seq_len),
      attention=", ".join(self.attention),
    )


def _due(step: int, every: int) -> bool:
  """Returns whether an action of every `every` steps is due after `step`, counted from 0."""
  return every > 0 and (step + 1) % every == 0
