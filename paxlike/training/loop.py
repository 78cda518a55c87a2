# SPDX-License-Identifier: Apache-2.0
"""The training loop: restores or initializes a run, trains it, and logs, evaluates and saves."""

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from etils import epath

from paxlike.checkpoints.array_names import flatten
from paxlike.checkpoints.branch import step_in
from paxlike.devices import malloc
from paxlike.errors import UserError
from paxlike.inference import decoding
from paxlike.inference.sampling import Sampling
from paxlike.layers import flops
from paxlike.layers.stack import layout_of
from paxlike.processes import job_watch, phases
from paxlike.processes.host_collectives import broadcast
from paxlike.processes.signals import StopSignal
from paxlike.telemetry.run_header import RunHeader
from paxlike.telemetry.run_log import RunLog
from paxlike.telemetry.step_metrics import Meter, Reading, check_finite
from paxlike.training import decode_mode, layer_metrics, ramp, rollback
from paxlike.training.best_checkpoint import BestTracker
from paxlike.training.evaluation import Stopped
from paxlike.training.objectives import OnPolicyGkd
from paxlike.training.profiler import Profiler
from paxlike.training.reinforcement.distillation_training import DistillationTraining
from paxlike.training.reinforcement.policy_training import PolicyTraining
from paxlike.training.replica_check import check_repeated, check_replicas, checksums
from paxlike.training.rollback import Rollback, Rollbacks
from paxlike.training.train_input import TrainInput
from paxlike.training.train_state import TrainState

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer


class Loop:
  """The training of one run in its folder."""

  def __init__(self, trainer: "Trainer", folder: epath.Path, run_log: RunLog):
    self._trainer = trainer
    self._run_log = run_log
    self._best = BestTracker(folder, trainer.best, saving=trainer.saving)
    self._source = trainer.state_source(folder)
    self._saved = self._source.checkpoints(
      keep=trainer.keep,
      preserved=lambda: self._best.step,
      check_owner=run_log.check_owner,
      on_commit=run_log.saved,
    )
    self._stop = StopSignal()
    self._profiler = Profiler(trainer.profile, folder, run_log.note, num_steps=trainer.num_steps)
    self._meter = Meter(depth=trainer.placer.steps_in_flight)
    self._rollbacks = Rollbacks(folder, most=trainer.max_skipped_in_a_row)
    self._spike: int | None = None  # The step of a spike that the run rolls back from.
    self._after_spike: dict[str, Any] = {}  # The position in the data after it.
    is_taught = isinstance(trainer.objective, OnPolicyGkd)
    kind = DistillationTraining if is_taught else PolicyTraining
    self._policy = None if trainer.rollouts is None else kind(trainer)
    # By the index of the stage, and by whether layers are logged.
    self._programs: dict[tuple[int, bool], Any] = {}
    self._layout = layout_of(trainer.model)

  def run(self, files: Mapping[str, Any]) -> int:
    """Trains as `Trainer.train` does, in the context of its mesh."""
    with self._saved, self._stop, self._profiler, self._policy or contextlib.nullcontext():
      while (signal := self._train(files)) is None:
        pass  # After a spike, it goes on from the newest checkpoint with the data after the spike.
      return signal

  def _train(self, files: Mapping[str, Any]) -> int | None:
    """Trains from the newest checkpoint to the end, or to a spike to roll back from.

    Returns:
      The signal that ended the run early, else 0; None after such a spike.
    """
    trainer, run_log, best = self._trainer, self._run_log, self._best
    state, data_state, provenance = self._source.state(self._saved, run_log)
    start = int(state.step)
    if data_state == {}:
      raise UserError(
        f"the checkpoints in {self._source.folder} are of a paxlike.Session, which has no training"
        " data: to go on from them, name another folder, and this one by CHECKPOINT_RESTORE_PATH."
      )
    if run_log.is_past(start, num_steps=trainer.num_steps):
      return 0
    best.forget(after=start)
    skipped = self._skipped(start)
    position = data_state if skipped is None else skipped.train_input
    if self._policy is not None:
      self._policy.restore(position or {})
    if trainer.reference is not None:
      reference, files_of_it = self._source.reference(state)
      state, provenance = dataclasses.replace(state, reference=reference), provenance | files_of_it
    if self._policy is not None:
      provenance = provenance | self._policy.load(self._source.recorded(state))
    phases.enter("data", start)
    with (
      TrainInput(
        trainer.stages,
        step=start,
        position=position,
        seen=start if skipped is None else skipped.spike + 1,
      ) as train_input,
      job_watch.reporting(),
    ):
      # All checks come before the first write.
      if start < trainer.num_steps:
        train_input.open()
      run_log.start(
        self._header(-1),
        {**files, **provenance, rollback.FILE: self._rollbacks.text()},
        step=start,
        num_steps=trainer.num_steps,
        skip=trainer.speed_skip,
        target_tokens=trainer.target_tokens,
      )
      run_log.stage(self._header(train_input.stage))
      self._profile(start)
      owed = self._evaluates_after(start) and best.lacks_evaluation(start, trainer.eval_data)
      if owed:  # The run was stopped before or during the evaluation at step `start`.
        keep = self._judge(state, start)
        if keep and trainer.saving and start not in broadcast(self._saved.steps):
          assert position is not None  # It is of another run's checkpoint.
          self._save(state, position)
      stopping = owed and self._stop.requested()
      for step in range(start, trainer.num_steps):
        if stopping or best.is_hopeless:
          break
        state, data_state = self._step(step, state, train_input)
        stopping = self._after(step, state, data_state)
        if self._spike is not None:
          self._after_spike = train_input.position(self._spike)
          phases.enter("save", step)
          self._saved.wait()
          if not self._stop.requested():
            return None
          run_log.status("stopped", start)  # A restart finds the spike again.
          return self._stop.number or 0
    self._log(self._meter.flush())
    phases.enter("save", int(state.step))
    self._saved.wait()
    phases.enter("end")
    self._finish(state, has_progressed=owed or int(state.step) > start)
    return self._stop.number or 0

  def _skipped(self, start: int) -> Rollback | None:
    """Returns the rollback whose data the run skips from step `start` on; None: it skips none.

    Raises:
      RunError: The run has rolled back to this step too often.
    """
    spike, self._spike = self._spike, None
    self._rollbacks.forget(after=start)
    branch = self._trainer.branch
    if branch is not None and step_in(branch.path) == start:
      self._rollbacks.inherit(branch.run, start)
    if spike is not None:
      self._meter = Meter(depth=self._trainer.placer.steps_in_flight)
      self._rollbacks.add(Rollback(checkpoint=start, spike=spike, train_input=self._after_spike))
      self._best.forget_results(after=start)
    last = self._rollbacks.last(start)
    if last is not None:
      self._run_log.note(
        f"from step {start}, the data up to those of the spike at step {last.spike} are skipped"
        f" ({rollback.FILE})"
      )
    return last

  def _step(
    self, step: int, state: TrainState, train_input: TrainInput
  ) -> tuple[TrainState, dict[str, Any]]:
    """Dispatches a step; returns the new state and the state of the data."""
    phases.enter("data", step)
    if train_input.enters_stage():
      self._pause("another stage of the ramp")
      self._run_log.stage(self._header(train_input.stage))
    trainer = self._trainer.stages[train_input.stage].trainer
    batch = train_input.next()
    # The devices do not wait for data while they still compute an earlier step.
    phases.enter("dispatch", step, counts_as="step" if self._meter.is_computing else None)
    if self._policy is None:
      arrays: Any = trainer.placer.put(batch.arrays)
    else:
      arrays = batch.arrays, train_input.following() if self._policy.is_behind else None
    which = train_input.stage, _due(step, self._trainer.log_layers_every)
    if which not in self._programs:
      phases.enter("compile")
      self._programs |= self._compiled(step, state, train_input.stage)
      phases.enter("dispatch", step)
    program = self._programs[which]
    repeated = None
    if _due(step, self._trainer.repeat_step_every):
      self._pause("repeating a step")
      repeated = checksums(program(jax.tree.map(jnp.copy, state), arrays)[0])
    with self._profiler.step(step):
      state, *reported = program(state, arrays)
    if repeated is not None:
      check_repeated(repeated, checksums(state), step)
    phases.enter("step", step)
    self._log(self._meter.add(step, *reported))
    return state, batch.state

  def _after(self, step: int, state: TrainState, data_state: dict[str, Any]) -> bool:
    """Saves and evaluates if due after a step; returns whether the run is to stop."""
    trainer = self._trainer
    stopping = self._stop.requested()
    ending = stopping or step + 1 == trainer.num_steps
    save = trainer.saving and (ending or _due(step, trainer.save_every))
    evaluate = not stopping and self._evaluates_after(step + 1)
    self._profile(step + 1)
    if _due(step, trainer.check_replicas_every):
      self._check_replicas(state)
    if save or evaluate or ending:
      self._log(self._meter.flush())
    if self._spike is not None:  # What comes after it is neither saved nor evaluated.
      return False
    if save:
      self._save(state, data_state)
      self._run_log.status("running", step + 1)
    if evaluate:
      keep = self._judge(state, step + 1)
      stopping = self._stop.requested()
      if (keep or stopping) and trainer.saving and not save:
        self._save(state, data_state)
    return stopping

  def _compiled(self, step: int, state: TrainState, first: int) -> dict[tuple[int, bool], Any]:
    """Returns the programs of all steps from `step` on; `first` is the index of its stage."""
    if self._policy is not None:
      return {(first, False): self._policy}
    every, num_steps, programs = self._trainer.log_layers_every, self._trainer.num_steps, {}
    for number, stage in enumerate(self._trainer.stages[first:], first):
      period = range(step, min(step + max(every, 1), stage.end, num_steps))
      step = max(step, min(stage.end, num_steps))
      for log_layers in sorted({_due(later, every) for later in period}):
        began = time.perf_counter()
        trainer = stage.trainer
        _, batch = trainer.abstract()
        programs[number, log_layers] = trainer.compile(state, batch, log_layers=log_layers)
        if log_layers or trainer.execution.compiled_step is None:
          name = "the step that logs layers" if log_layers else "the step"
          of = "" if trainer is self._trainer else f" before step {stage.end}"
          seconds = time.perf_counter() - began
          self._run_log.note(f"compiled {name}{of} in {seconds:.1f} s")
    if self._trainer.check_replicas_every or self._trainer.repeat_step_every:
      checksums(state)  # Compiles.
    malloc.return_freed_heap()
    return programs

  def _log(self, readings: Iterable[Reading]):
    if self._spike is not None:
      return  # Steps after the spike are computed again, with other data.
    for reading in readings:
      self._run_log.step(reading, due=_due(reading.step, self._trainer.summary_every))
      if reading.layers is not None:
        table = layer_metrics.table(self._trainer.definition, reading.layers)
        self._run_log.layers(reading.step, table)
      if self._trainer.optimizer.rolls_back and reading.values["spike"]:
        self._spike = reading.step
        return
      most = self._trainer.max_skipped_in_a_row
      check_finite(reading, self._run_log.skipped_in_a_row, most=most)

  def _pause(self, cause: str):
    """Waits for the steps in flight; the next one is not timed because of `cause`."""
    self._log(self._meter.flush())
    self._meter.pause(cause)

  def _profile(self, step: int):
    """Starts or stops the profiler if that is due before `step`."""
    if change := self._profiler.change(step):
      self._pause(f"the profiler's {change}")
      phases.enter("profile", step)
    self._profiler.update(step)

  def _check_replicas(self, state: TrainState):
    self._pause("the check of replicas")
    check_replicas(state, int(state.step) - 1)

  def _save(self, state: TrainState, data_state: dict[str, Any]):
    every = self._trainer.check_replicas_every
    if every and int(state.step) % every:  # Else it has just been checked.
      self._check_replicas(state)
    self._pause("saving")
    phases.enter("save", int(state.step))
    changing = flatten(dataclasses.replace(state, frozen={}, reference={}))
    if self._policy is not None:
      data_state = data_state | self._policy.saved()
    self._saved.save(int(state.step), changing, layout=self._layout, train_input=data_state)

  def _evaluates_after(self, step: int) -> bool:
    trainer, at_end = self._trainer, step == self._trainer.num_steps
    return bool(step and trainer.eval_data) and (at_end or _due(step - 1, trainer.eval_every))

  def _judge(self, state: TrainState, at: int) -> bool:
    """Evaluates a state unless stopped; returns whether the result requires a checkpoint."""
    self._pause("evaluation")
    params = self._trainer.evaluated(state)
    with contextlib.suppress(Stopped):
      results = self._trainer.measure(params, at, self._run_log, stops=self._stop.requested)
      return self._best.evaluated(results, at) or self._best.is_hopeless
    return False

  def _finish(self, state: TrainState, *, has_progressed: bool):
    trainer, run_log, best, step = self._trainer, self._run_log, self._best, int(state.step)
    owes = self._evaluates_after(step) and best.lacks_evaluation(step, trainer.eval_data)
    finished = best.is_hopeless or (step == trainer.num_steps and not owes)
    if best.is_hopeless and step < trainer.num_steps:
      run_log.note(f"stopped early: checkpoint {best.step} is still the best")
    if finished and has_progressed and trainer.sample_prompt is not None:
      sampling, seed = Sampling(temperature=0.7, top_p=0.9), trainer.seed
      how = decoding.DecodingOptions(max_new_tokens=200, sampling=sampling, seed=seed)
      *_, last = decode_mode.decoding_of(trainer, trainer.evaluated(state), how).run(
        [trainer.sample_prompt]
      )
      run_log.sampled(trainer.sample_prompt, last.text, step)
    run_log.status("finished" if finished else "stopped", step)

  def _header(self, stage: int) -> RunHeader:
    """Returns the header for a stage of the run."""
    stages = self._trainer.stages
    trainer = stages[stage].trainer
    return RunHeader(
      num_params=trainer.definition.num_params,
      num_trained=trainer.definition.num_trained,
      batch_size=trainer.batch_size,
      seq_len=trainer.data.seq_len,
      epoch_rows=trainer.data.epoch_rows,
      stages=ramp.text(stages),
      num_sequences=ramp.num_sequences(stages, trainer.num_steps),
      devices=trainer.devices,
      flops=flops.per_token(trainer.definition, trainer.data.seq_len),
      attention=", ".join(trainer.attention),
      answers="" if trainer.rollouts is None else trainer.rollouts.text,
      matmul_dtype=flops.matmul_dtype(trainer.definition),
    )


def _due(step: int, every: int) -> bool:
  """Returns whether an action of every `every` steps is due after `step`, counted from 0."""
  return every > 0 and (step + 1) % every == 0
