# SPDX-License-Identifier: Apache-2.0
"""The trainer: an immutable description of one run, and the methods that execute it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath

from paxlike.checkpoints.branch import Branch
from paxlike.checkpoints.orbax_hooks import check_keep
from paxlike.checkpoints.warm_start import Restore
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.chat import prompt_rendering
from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.data.dataset import Batches, Dataset
from paxlike.devices import mesh
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.errors import UserError
from paxlike.layers.attention.auto import Place
from paxlike.layers.decoder import Batch, Decoder
from paxlike.layers.module import Definition, Params
from paxlike.processes import job_watch
from paxlike.telemetry.run_log import RunLog
from paxlike.training import evaluated_weights, preflight, ramp, requirements, train_state
from paxlike.training.best_checkpoint import Criterion
from paxlike.training.evaluation import EvalSet, Evaluator, Result
from paxlike.training.execution import Execution
from paxlike.training.initial_state import StateSource
from paxlike.training.loop import Loop
from paxlike.training.objectives import NextToken, Objective
from paxlike.training.optimizers import Optimizer
from paxlike.training.profiler import Profiling
from paxlike.training.ramp import Ramp, Stage
from paxlike.training.reinforcement import answers
from paxlike.training.reinforcement.model_reward import AnswerScorer, ModelReward
from paxlike.training.reinforcement.reward_set import RewardEvaluator, RewardSet
from paxlike.training.reinforcement.rollouts import Rollouts
from paxlike.training.train_state import TrainState
from paxlike.training.train_step import TrainStep, make_train_step


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """One run: its configuration, training, evaluation and decoding.

  Building it allocates and reads nothing. It is immutable; `dataclasses.replace` makes a variant.

  Attributes:
    model: The model, with abstract weights.
    optimizer: The optimizer with its schedule.
    mesh: The shape of the device mesh.
    train_data: The training data; None to evaluate only.
    eval_data: Eval sets by name; folders of results have the same names.
    percore_batch_size: Sequences per device and optimizer step.
    ramps: Smaller batches or shorter sequences of the first steps, in order.
    accumulation_steps: Gradient-accumulation microbatches per optimizer step.
    num_steps: Optimizer steps of the run.
    seed: Seed of weights and dropout.
    summary_every: Steps between log lines.
    log_layers_every: Steps between records of the metrics of single layers; 0: none.
    speed_skip: First steps of each start that the speed at the end leaves out.
    target_tokens: Tokens of a whole training, whose time is estimated at the end; None: none is.
    eval_every: Steps between evaluations; 0: only after the last step.
    save_every: Steps between checkpoints; 0: only after the last step.
    keep: Number of newest checkpoints to keep; None: all.
    max_skipped_in_a_row: Number of consecutive non-finite steps that ends the run.
    check_replicas_every: Steps between comparisons of all copies of the state; 0: none.
    repeat_step_every: Steps between steps that are computed twice and compared; 0: none.
    sample_prompt: Text that the trained model continues at the end.
    trackers: Names of the trackers that get the run's records; see `telemetry.trackers`.
    tracker_project: Project of the run in trackers; None: the default of each.
    restore: Source of a new run's initial weights; None: all are initialized.
    branch: The checkpoint of another run that a new run goes on from.
    best: Criterion of the best checkpoint; None: none is kept.
    objective: The training objective.
    trained: Pattern (`re.search`) of the trained weights; the others are frozen.
    weight_dtype: Storage dtype of trained weights; bfloat16 uses stochastic rounding.
    stall_timeout: Seconds without progress that end the job; None: derived; 0: no limit.
    rollouts: How answers are sampled and rewarded, in reinforcement learning; None: training is on
      the data.
    profile: Which steps to profile, and how; None: none.
    stack_interval: Seconds between dumps of all threads' stacks; None: no dumps.
    read_only: Whether nothing is trained; weights with a quantization scheme are then quantized.
    saving: Whether checkpoints are written.
    execution: Compiler options and compiled step; given after building, not by a graph.
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
  log_layers_every: ranges.NonNegative = 0
  speed_skip: ranges.NonNegative = 5
  target_tokens: ranges.PositiveFloat | None = None
  check_replicas_every: ranges.NonNegative = 0
  repeat_step_every: ranges.NonNegative = 0
  sample_prompt: str | None = None
  trackers: tuple[ranges.Name, ...] = ("tensorboard",)
  tracker_project: ranges.Name | None = None
  restore: Restore | None = None
  branch: Branch | None = None
  ramps: tuple[Ramp, ...] = ()
  best: Criterion | None = None
  objective: Objective = dataclasses.field(default_factory=NextToken)
  trained: str = ""
  weight_dtype: Literal["float32", "bfloat16"] = "float32"
  stall_timeout: ranges.Seconds | None = None
  stack_interval: ranges.Interval | None = None
  rollouts: Rollouts | None = None
  profile: Profiling | None = None
  read_only: bool = False
  saving: bool = True
  execution: Execution = dataclasses.field(default_factory=Execution)

  def check(self, *, training: bool = True):
    """Checks the run before anything is computed or written.

    Raises:
      UserError: The mesh, the batch or a data set is invalid.
    """
    check_keep(self.keep)
    preflight.check(self, training=training)

  @functools.cached_property
  def definition(self) -> Definition:
    """The model as weight specs and a pure function."""
    return Definition(
      self.model, trained=self.trained, dtype=self.weight_dtype, read_only=self.read_only
    )

  @property
  def reference(self) -> Definition | None:
    """The reference model of whose weights a step needs a copy; None: it needs none."""
    return self.objective.reference(self.definition)

  @property
  def models_beside(self) -> list[Definition]:
    """The models, besides the one that is trained, whose weights are on the devices."""
    users = (self.rollouts, *self.eval_data.values())
    rewards = {getattr(user, "reward_model", None) for user in users}
    reference = [] if self.reference is None else [self.reference]
    return reference + [one.definition for one in rewards if one is not None]

  def state_source(self, folder: epath.Path) -> StateSource:
    """Returns the source of the state and weights of the run in `folder`."""
    return StateSource(
      folder=folder,
      definition=self.definition,
      optimizer=self.optimizer,
      devices=self.devices,
      seed=self.seed,
      restore=self.restore,
      branch=self.branch,
      teacher=getattr(self.objective, "teacher", None),
    )

  @functools.cached_property
  def placer(self) -> BatchPlacer:
    """Places batches on the devices."""
    models = [self.model] if self.reference is None else [self.model, self.reference.module]
    limits = [model.max_segments(Place.on(self.devices)) for model in models]
    return BatchPlacer(
      self.devices,
      batch_size=self.batch_size,
      seq_len=self.data.seq_len,
      max_segments=min((most for most in limits if most is not None), default=None),
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
    place, length = Place.on(self.devices), self.data.seq_len
    return self.model.kernels(place, is_packed=is_packed, seq_len=length)

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

  def batches(self, *, state: Mapping[str, Any] | None, updates: int) -> Batches:
    """Returns this host's batches of the training data; see `Dataset.batches`."""
    if self.rollouts is not None:
      return self.data.batches(self.rollouts.num_given, state=state, updates=updates)
    rows = self.placer.rows
    return self.data.batches(self.batch_size, rows=rows, state=state, updates=updates)

  def datasets(self, *, training: bool = True) -> list[Any]:
    """Returns the training data, if any and if `training`, and the data of all eval sets."""
    of_training = [self.train_data] if training and self.train_data is not None else []
    return of_training + [eval_set.dataset for eval_set in self.eval_data.values()]

  @functools.cached_property
  def stages(self) -> list[Stage]:
    """The stages of the run; the last one is the trainer itself."""
    return ramp.stages(self)

  @property
  def batch_size(self) -> int:
    """Sequences per optimizer step, over all devices."""
    return mesh.global_batch_size(
      percore=self.percore_batch_size,
      num_devices=self.devices.size,
      accumulation_steps=self.accumulation_steps,
    )

  def train(self, folder: epath.Path, run_log: RunLog, *, files: Mapping[str, Any]) -> int:
    """Trains from the newest checkpoint in `folder`, or from the start, to `num_steps`.

    Args:
      folder: The run's folder; created if missing.
      run_log: Logs progress.
      files: Name -> text of files for the folder, written after the state is restored.

    Returns:
      The signal that ended the run early, else 0.

    Raises:
      UserError: The checkpoint is of another experiment, or cannot be written.
      RunError: The loss is no longer finite.
    """
    with jax.set_mesh(self.devices), self.watched(folder):
      return Loop(self, folder, run_log).run(files)

  def evaluate(self, folder: epath.Path, run_log: RunLog, *, step: int | None) -> int:
    """Evaluates checkpoint `step`, or the newest, on every eval set. Returns its step.

    Raises:
      UserError: There is no eval set or no such checkpoint, or it is of another experiment.
    """
    _ = self.evaluators  # Raises if there is no evaluation data.
    with jax.set_mesh(self.devices), self.watched(folder):
      step, params = self.state_source(folder).params(step)
      self.measure(params, step, run_log)
      return step

  def watched(self, folder: epath.Path | None = None) -> Any:
    """Returns a context in which a stall ends the job, and stacks are dumped; see `job_watch`."""
    return job_watch.watching(job_watch.Limits(folder, self.stall_timeout, self.stack_interval))

  @functools.cached_property
  def tokenizer_prompt_renderer(self) -> PromptRenderer | None:
    """Renders conversations with the chat template beside the tokenizer; None without one."""
    return prompt_rendering.beside(self.data.tokenizer)

  def load(self, folder: epath.PathLike, *, step: int | None = None) -> Params:
    """Returns the weights of checkpoint `step`, or the newest, in the dtypes of the layers.

    Raises:
      UserError: There is no such checkpoint, or it is of another experiment.
    """
    with jax.set_mesh(self.devices):
      return self.state_source(epath.Path(folder)).params(step)[1]

  def evaluated(self, state: TrainState) -> Params:
    """Returns the weights of a training state that evaluation uses."""
    return evaluated_weights.of_state(self.definition, self.optimizer, state, self.devices)

  def measure(self, params: Params, step: int, run_log: RunLog, **how: Any) -> dict[str, Result]:
    """Evaluates weights on each eval set and logs the results; `how` is for `Evaluator.run`."""
    results = {}
    for name, evaluator in self.evaluators.items():
      results[name] = evaluator.run(params, name=name, **how)
      run_log.evaluated(name, step, results[name].values, results[name].records)
    return results

  @functools.cached_property
  def evaluators(self) -> dict[str, Evaluator | RewardEvaluator]:
    """The evaluator of each eval set, by name.

    Raises:
      UserError: There is no eval set.
    """
    if not self.eval_data:
      raise UserError("this experiment has no evaluation data (eval_data).")
    return {name: self._evaluator(eval_set) for name, eval_set in self.eval_data.items()}

  def _evaluator(self, eval_set: EvalSet) -> Evaluator | RewardEvaluator:
    options: Any = {"compiler_options": self.execution.compiler_options}
    if isinstance(eval_set, RewardSet):
      scorer = self.scorer(eval_set.reward_model)
      return RewardEvaluator(self.definition, eval_set, scorer=scorer, **options)
    return Evaluator(self.definition, eval_set, self.placer, batch_size=self.batch_size, **options)

  def scorer(self, model: ModelReward | None) -> AnswerScorer | None:
    """Returns the scorer of a reward model, which training and evaluation share; None of None."""
    if model is not None and model not in self._scorers:
      self._scorers[model] = AnswerScorer(
        model,
        self.devices,
        batch_size=self.batch_size,
        compiler_options=self.execution.compiler_options,
      )
    return None if model is None else self._scorers[model]

  @functools.cached_property
  def _scorers(self) -> dict[ModelReward, AnswerScorer]:
    return {}

  @functools.cached_property
  def _step(self) -> Any:
    return self._jitted(log_layers=False)

  @functools.cached_property
  def _logging_step(self) -> Any:
    return self._jitted(log_layers=True)

  def _jitted(self, *, log_layers: bool) -> Any:
    return jax.jit(self.make_step(log_layers=log_layers), donate_argnums=0)

  def make_step(self, *, log_layers: bool = False) -> TrainStep:
    """Returns the pure function of a step; see `make_train_step`."""
    return make_train_step(
      self.definition,
      self.optimizer,
      seed=self.seed,
      num_microbatches=self.accumulation_steps,
      objective=self.objective,
      sources=self.data.sources,
      log_layers=log_layers,
    )

  def abstract(self) -> tuple[Any, Any]:
    """Returns the shapes, dtypes and shardings of the run's state and of its batches."""
    state = train_state.abstract(
      self.definition, self.optimizer, self.devices, reference=self.reference
    )
    if self.rollouts is None:
      batch = self.data.no_rows()
    else:
      has_values = self.model.value_head is not None
      batch = answers.no_rows(self.data.seq_len, with_values=has_values)
    return state, self.placer.abstract(batch)

  def trace(self):
    """Traces initialization and a step, so that errors appear early; JAX caches both."""
    with jax.set_mesh(self.devices):
      train_state.trace_init(self.definition, self.devices)
      for stage in self.stages:
        stage.trainer._step.trace(*stage.trainer.abstract())
        if self.log_layers_every:
          stage.trainer._logging_step.trace(*stage.trainer.abstract())

  def lower(
    self, state: TrainState, batch: Batch, *, log_layers: bool = False
  ) -> jax.stages.Lowered:
    """Returns the lowered step for arrays like these, which may be abstract.

    With `log_layers`, the step also returns `LayerMetrics`.
    """
    return (self._logging_step if log_layers else self._step).lower(state, batch)

  def compile(
    self, state: TrainState, batch: Batch, *, log_layers: bool = False
  ) -> jax.stages.Compiled:
    """Returns the program of a step, for arrays like these; see `lower`.

    Raises:
      UserError: The profile of `execution` is of another program.
    """
    if log_layers:  # A profile, or a compiled step, is of the other program.
      options = dict(self.execution.compiler_options)
      return self.lower(state, batch, log_layers=True).compile(compiler_options=options)
    if self.execution.compiled_step is not None:
      return self.execution.compiled_step
    return self.execution.compile_step(self.lower(state, batch))
