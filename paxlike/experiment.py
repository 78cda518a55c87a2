# SPDX-License-Identifier: Apache-2.0
"""Experiment: the knobs of a run, and the methods that turn them into one Fiddle graph.

A family overrides the methods that differ; a recipe sets knobs. A value derived from knobs is
computed in the method that uses it, so that subclasses, mixins and the command line all affect it.
"""

from typing import Any

import fiddle as fdl

from paxlike import fiddlers, layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.errors import UserError
from paxlike.knob_groups.checkpoint import CheckpointKnobs
from paxlike.knob_groups.fine_tuning import FineTuningKnobs
from paxlike.knob_groups.model import ModelKnobs
from paxlike.knob_groups.optimizer import OptimizerKnobs, ScheduleKnobs
from paxlike.knob_groups.parallelism import ParallelismKnobs
from paxlike.knob_groups.parametrization import ParametrizationKnobs
from paxlike.knob_groups.precision import PrecisionKnobs
from paxlike.knob_groups.profiling import ProfilingKnobs
from paxlike.knob_groups.run import BatchKnobs, RunKnobs
from paxlike.telemetry.callbacks import Callback
from paxlike.training.evaluation import EvalSet
from paxlike.training.objectives import NextToken, Objective
from paxlike.training.reinforcement.rollouts import Rollouts
from paxlike.training.trainer import Trainer


class Experiment(
  ModelKnobs,  # model(), and what it calls: stack(), pattern(), block(), attention(), mlp() ...
  PrecisionKnobs,
  ParallelismKnobs,  # mesh(), pipeline().
  BatchKnobs,  # ramps().
  OptimizerKnobs,  # optimizer().
  ScheduleKnobs,  # schedule(), branch().
  ParametrizationKnobs,
  RunKnobs,
  ProfilingKnobs,  # profile().
  CheckpointKnobs,  # best().
  FineTuningKnobs,  # restore().
):
  """A run of a decoder-only language model: the model, data, optimizer, mesh and run length."""

  def trainer(self) -> fdl.Config[Trainer]:
    """Returns the root graph: the only thing that is built, saved, printed and compared."""
    graph = fdl.Config(
      Trainer,
      model=self.model(),
      optimizer=self.optimizer(),
      mesh=self.mesh(),
      train_data=self.train_data(),
      eval_data=self.eval_data(),
      percore_batch_size=self.PERCORE_BATCH_SIZE,
      accumulation_steps=self.GRADIENT_ACCUMULATION_STEPS,
      num_steps=self.max_steps(),
      seed=self.RANDOM_SEED,
      summary_every=self.SUMMARY_INTERVAL_STEPS,
      speed_skip=self.SPEED_SKIP_STEPS,
      target_tokens=self.TARGET_TOKENS,
      log_layers_every=self.LOG_LAYERS_EVERY,
      eval_every=self.EVAL_INTERVAL_STEPS,
      save_every=self.CHECKPOINT_EVERY_N_STEPS,
      keep=self.CHECKPOINT_MAX_TO_KEEP,
      max_skipped_in_a_row=self.MAX_SKIPPED_STEPS_IN_A_ROW,
      check_replicas_every=self.CHECK_REPLICAS_EVERY,
      repeat_step_every=self.REPEAT_STEP_EVERY,
      sample_prompt=self.SAMPLE_PROMPT,
      trackers=self.TRACKERS,
      tracker_project=self.TRACKER_PROJECT,
      restore=self.restore(),
      branch=self.branch(),
      ramps=self.ramps(),
      best=self.best(),
      objective=self.objective(),
      rollouts=self.rollouts(),
      weight_dtype=self.WEIGHT_DTYPE,
      stall_timeout=self.STALL_TIMEOUT,
      stack_interval=self.STACK_TRACE_INTERVAL,
      profile=self.profile(),
    )
    self.adjust(graph)
    fiddlers.precision(graph, self.FPROP_DTYPE)
    if quantization := self.quantization():
      fiddlers.quantize(graph, quantization)
    if self.ENABLE_TE:
      fiddlers.transformer_engine(graph)
    self.adapt(graph)
    fiddlers.attention(graph, self.ATTENTION_KERNEL)
    if layers.KERNELS[self.ATTENTION_KERNEL].limits_segments:
      fiddlers.segments(graph, self.MAX_SEGMENTS_PER_ROW)
    fiddlers.remat(graph, self.CHECKPOINT_POLICY)
    if self.SHARD_SEQUENCE_OVER_TENSOR:
      fiddlers.shard_sequences(graph)
    fiddlers.stack(graph, self.USE_REPEATED_LAYER)
    if pipeline := self.pipeline():
      fiddlers.pipeline(graph, pipeline)
    return graph

  def adjust(self, graph: fdl.Buildable):
    """Changes a graph that contains the model by knobs that serve all families."""
    if self.QK_NORM:
      fiddlers.qk_norm(graph)
    if self.MTP_NUM_LAYERS:
      fiddlers.multi_token_prediction(
        graph, self.MTP_NUM_LAYERS, kind=self.MTP_KIND, loss_weight=self.MTP_LOSS_SCALING_FACTOR
      )
    if self.QK_CLIP is not None:
      if self.OPTIMIZER == "schedule_free_adamw":
        raise UserError("QK_CLIP: schedule_free_adamw keeps weights of its own: leave one out.")
      fiddlers.qk_clip(graph, self.QK_CLIP)
    if self.Z_LOSS or self.LABEL_SMOOTHING:
      fiddlers.loss(graph, z_loss=self.Z_LOSS, label_smoothing=self.LABEL_SMOOTHING)
    self.parametrize(graph)
    if self.EMBEDDING_SCALE != 1 or self.RESIDUAL_SCALE != 1:
      fiddlers.rescale(graph, embedding=self.EMBEDDING_SCALE, residual=self.RESIDUAL_SCALE)

  def train_data(self) -> fdl.Config | None:
    """Returns the training data, a `data.Dataset`; None to evaluate only. See `datasets`."""
    raise UserError(f"{type(self).__name__} has no training data: subclass a mixin of datasets.py.")

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    """Returns the eval sets by name."""
    return {}

  def eval_set(self, dataset: fdl.Config, **options: Any) -> fdl.Config[EvalSet]:
    """Returns an eval set with the metrics of language models."""
    return fdl.Config(EvalSet, dataset=dataset, **options)

  def objective(self) -> fdl.Config[Objective]:
    """Returns the training objective."""
    return fdl.Config(NextToken)

  def rollouts(self) -> fdl.Config[Rollouts] | None:
    """Returns how answers are sampled and rewarded; None: training is on the data."""
    return None

  def callbacks(self) -> list[Callback]:
    """Returns the callbacks of training, which are not part of the graph or `config.json`.

    This is called more than once, so callbacks should open files in `on_start` only.
    """
    return []

  @classmethod
  def hugging_face(cls) -> hugging_face.Family | None:
    """Returns the conversion from and to Hugging Face; None if the family has none."""
    return None
