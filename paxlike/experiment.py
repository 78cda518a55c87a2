# SPDX-License-Identifier: Apache-2.0
"""Experiment: the knobs of a run, and the methods that turn them into one Fiddle graph.

A family overrides the methods that differ; a recipe sets knobs. A value derived from knobs is
computed in the method that uses it, so that subclasses, mixins and the command line all affect it.
"""

import itertools
from typing import Any, Literal

import fiddle as fdl

from paxlike import fiddlers, layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.warm_start import Restore
from paxlike.config import building, graph_types, ranges
from paxlike.config.knobs import UNSET, Knobs
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers.remat import Policy
from paxlike.telemetry.callbacks import Callback
from paxlike.training import optimizers
from paxlike.training.best_checkpoint import Criterion
from paxlike.training.evaluation import EvalSet
from paxlike.training.objectives import NextToken, Objective
from paxlike.training.trainer import Trainer


class Experiment(Knobs):
  """A decoder-only language model, its data, optimizer, mesh and schedule of work."""

  # Model.
  VOCAB_SIZE: ranges.Size = UNSET  #: Number of token ids.
  MAX_SEQ_LEN: ranges.Size = 2048  #: Tokens per sequence.
  NUM_LAYERS: ranges.Depth = UNSET  #: Number of transformer blocks.
  MODEL_DIMS: ranges.Size = UNSET  #: Width of the residual stream.
  HIDDEN_DIMS: ranges.Size | None = None  #: Width of the feed-forward layer. None: 4 x MODEL_DIMS.
  NUM_HEADS: ranges.Size = UNSET  #: Number of attention heads.
  DIMS_PER_HEAD: ranges.Size | None = None  #: Width of a head. None: MODEL_DIMS / NUM_HEADS.
  INIT_STD: ranges.Weight = 0.02  #: Standard deviation of initial weights.
  DROPOUT_PROB: ranges.Probability = 0.0  #: Dropout of each block's attention and MLP outputs.
  EMBEDDING_DROPOUT_PROB: ranges.Probability = 0.0  #: Dropout of the embeddings.

  # Computation.
  FPROP_DTYPE: ranges.ComputeDtype = "bfloat16"  #: Compute dtype.
  #: Storage dtype of trained weights; bfloat16 uses stochastic rounding.
  WEIGHT_DTYPE: Literal["float32", "bfloat16"] = "float32"
  #: 8-bit matmuls in the linear maps and experts of blocks: fp8 (current scaling), fp8_delayed
  #: (delayed scaling), mxfp8 (block scaling, not in experts) or int8. None: compute dtype.
  QUANTIZATION: Literal["fp8", "fp8_delayed", "mxfp8", "int8"] | None = None
  USE_FP8: bool = False  #: Pax's name for QUANTIZATION=fp8.
  ENABLE_TE: bool = False  #: Use NVIDIA's Transformer Engine in the linear maps of blocks.
  USE_REPEATED_LAYER: bool | None = None  #: Scan over layers. None: if there are several devices.
  #: Activations saved for the backward pass; the rest is recomputed. OFFLOAD_...: in host memory.
  CHECKPOINT_POLICY: Policy = "SAVE_EVERYTHING"
  #: Attention kernel. auto: ring if the mesh axis context is larger than 1, else cudnn or splash if
  #: supported, xla on CPUs, else xla_chunked.
  ATTENTION_KERNEL: Literal[
    "auto", "xla", "xla_chunked", "cudnn", "splash", "tokamax", "ring", "gathered"
  ] = "auto"
  #: Maximum number of documents per packed sequence with cudnn attention.
  MAX_SEGMENTS_PER_ROW: ranges.Size = 64
  #: Mesh within a slice or node: [data, fsdp, tensor] or {axis: size}; -1: all remaining devices.
  ICI_MESH_SHAPE: tuple[ranges.AxisSize, ...] | dict[str, ranges.AxisSize] = (-1, 1, 1)
  #: Mesh across slices or nodes, in the same form.
  DCN_MESH_SHAPE: tuple[ranges.AxisSize, ...] | dict[str, ranges.AxisSize] = (1, 1, 1)
  #: Pipeline schedule, if the mesh axis pipeline is larger than 1.
  PIPELINE_SCHEDULE: Literal["gpipe", "circular", "1f1b", "interleaved_1f1b"] = "1f1b"
  NUM_STAGES: ranges.Positive | None = None  #: Pipeline stages. None: size of the axis pipeline.
  #: Chunks of layers per stage, for circular and interleaved_1f1b. None: 1.
  NUM_VIRTUAL_STAGES: ranges.Positive | None = None
  CIRCULAR_REPEAT: ranges.Positive | None = None  #: Pax's name for NUM_VIRTUAL_STAGES.
  #: Pipeline microbatches per gradient-accumulation step. None: NUM_STAGES.
  NUM_MICROBATCHES: ranges.Positive | None = None
  #: Save only each chunk's input for the backward pass; False: what CHECKPOINT_POLICY saves.
  PIPELINE_RECOMPUTE: bool = True

  #: Sequence parallelism: shard norms and residuals along the sequence over the mesh axis tensor.
  SHARD_SEQUENCE_OVER_TENSOR: bool = False

  # Batch.
  #: Sequences per device and optimizer step; may be fractional.
  PERCORE_BATCH_SIZE: ranges.Batch = UNSET
  #: Number of microbatches that the batch is split into.
  GRADIENT_ACCUMULATION_STEPS: ranges.Size = 1

  # Optimizer.
  LEARNING_RATE: ranges.Rate = UNSET  #: Peak of the schedule.
  LR_SCHEDULE: Literal[  #: Learning-rate schedule.
    "linear_rampup_cosine_decay", "linear_rampup_exponential_decay", "constant"
  ] = "linear_rampup_cosine_decay"
  LR_COS_WARMUP: ranges.NonNegative = 4000  #: Linear warmup steps of the cosine schedule.
  #: Step at which the cosine decay starts. None: LR_COS_WARMUP + 1.
  LR_COS_DECAY_START: ranges.NonNegative | None = None
  #: Step at which the cosine decay ends. None: MAX_STEPS.
  LR_COS_DECAY_END: ranges.NonNegative | None = None
  LR_COS_MIN_RATIO: ranges.Fraction = 0.1  #: Final learning rate as a fraction of the peak.
  LR_LRED_WARMUP: ranges.NonNegative = 4000  #: Warmup steps of the exponential schedule.
  #: Step at which the exponential decay starts. None: LR_LRED_WARMUP + 1.
  LR_LRED_DECAY_START: ranges.NonNegative | None = None
  #: Step at which the exponential decay ends. None: MAX_STEPS.
  LR_LRED_DECAY_END: ranges.NonNegative | None = None
  LR_LRED_MIN_RATIO: ranges.Epsilon = 0.1  #: Final learning rate as a fraction of the peak.
  ADAM_BETA1: ranges.Probability = 0.9  #: Decay rate of the first moment.
  ADAM_BETA2: ranges.Probability = 0.95  #: Decay rate of the second moment.
  ADAM_EPSILON: ranges.Epsilon = 1e-8  #: Added outside the square root.
  #: Storage dtype of both moments; bfloat16 uses stochastic rounding.
  ADAM_MOMENT_DTYPE: Literal["float32", "bfloat16"] = "float32"
  #: Shard the optimizer state over the mesh axis data too (ZeRO-1).
  SHARD_OPTIMIZER_OVER_DATA: bool = False
  #: Offload the optimizer state to host memory between updates.
  OPTIMIZER_ON_HOST: bool = False
  WEIGHT_DECAY: ranges.Weight = 0.1  #: Decoupled weight decay.
  WEIGHT_DECAY_ON: Literal["everything", "matrices"] = "everything"  #: Which weights decay.
  #: Maximum global gradient norm. None: no clipping.
  CLIP_GRADIENT_NORM_TO_VALUE: ranges.PositiveFloat | None = 1.0

  # Run.
  MAX_STEPS: ranges.NonNegative = UNSET  #: Optimizer steps.
  #: Passes over the training data, instead of MAX_STEPS. None: MAX_STEPS applies.
  NUM_EPOCHS: ranges.PositiveFloat | None = None
  RANDOM_SEED: ranges.NonNegative = 1234  #: Seed of weights, dropout and data order.
  SUMMARY_INTERVAL_STEPS: ranges.Positive = 100  #: Steps between log lines.
  #: Steps between evaluations. 0: only after the last step.
  EVAL_INTERVAL_STEPS: ranges.NonNegative = 100
  #: Steps between checkpoints. 0: only after the last step.
  CHECKPOINT_EVERY_N_STEPS: ranges.NonNegative = 5000
  CHECKPOINT_MAX_TO_KEEP: ranges.Positive | None = 10  #: Newest checkpoints to keep. None: all.
  #: Metric, such as validation/log_pplx (SET/METRIC), whose best checkpoint is also kept.
  BEST_CHECKPOINT_METRIC: ranges.Name | None = None
  #: Whether its lowest or highest value is best. None: min for log_pplx, max for other metrics.
  BEST_CHECKPOINT_MODE: Literal["min", "max"] | None = None
  #: Stop after this many evaluations in a row without improvement. None: never.
  EARLY_STOPPING_PATIENCE: ranges.Positive | None = None
  #: Abort after this many steps in a row whose loss or gradient is not finite.
  MAX_SKIPPED_STEPS_IN_A_ROW: ranges.Positive = 10
  #: Seconds without progress after which the job exits with status 75, so that a launcher restarts
  #: it. None: derived from durations so far, at least 60, no limit while compiling. 0: no limit.
  STALL_TIMEOUT: ranges.Seconds | None = None
  #: Seconds between dumps of all threads' stacks into the run's folder. None: only after a stall
  #: and on SIGUSR1.
  STACK_TRACE_INTERVAL: ranges.Interval | None = None
  #: Folder of a run or converted model to restore initial weights from. None: initialize all.
  CHECKPOINT_RESTORE_PATH: ranges.Path | None = None
  CHECKPOINT_RESTORE_STEP: ranges.NonNegative | None = None  #: Its checkpoint. None: the newest.
  CHECKPOINT_INCLUDE_RULES: tuple[str, ...] = ("",)  #: Patterns of weights to restore.
  CHECKPOINT_IGNORE_RULES: tuple[str, ...] = ()  #: Patterns of weights to initialize anyway.
  USE_LORA: bool = False  #: Train only LoRA adapters of linear maps.
  LORA_RANK: ranges.Size = 8  #: Rank of the adapters.
  LORA_ALPHA: ranges.Factor | None = None  #: Scale: LORA_ALPHA / LORA_RANK. None: 1.
  LORA_DROPOUT: ranges.Probability = 0.0  #: Dropout of the adapters' inputs.
  LORA_BASE_QUANTIZATION: Literal["int8", "nf4"] | None = (
    None  #: Weight-only quantization of the base model's matrices (QLoRA). None: compute dtype.
  )
  #: Linear maps to adapt: all, attention, mlp, or roles such as query,up.
  LORA_TARGET_LAYERS: ranges.Name = "all"
  SAMPLE_PROMPT: str | None = None  #: Prompt that the trained model continues. None: no sample.

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
      eval_every=self.EVAL_INTERVAL_STEPS,
      save_every=self.CHECKPOINT_EVERY_N_STEPS,
      keep=self.CHECKPOINT_MAX_TO_KEEP,
      max_skipped_in_a_row=self.MAX_SKIPPED_STEPS_IN_A_ROW,
      sample_prompt=self.SAMPLE_PROMPT,
      restore=self.restore(),
      best=self.best(),
      objective=self.objective(),
      weight_dtype=self.WEIGHT_DTYPE,
      stall_timeout=self.STALL_TIMEOUT,
      stack_interval=self.STACK_TRACE_INTERVAL,
    )
    fiddlers.precision(graph, self.FPROP_DTYPE)
    if quantization := self.quantization():
      fiddlers.quantize(graph, quantization)
    if self.ENABLE_TE:
      fiddlers.transformer_engine(graph)
    self.adapt(graph)
    fiddlers.attention(graph, self.ATTENTION_KERNEL)
    if self.ATTENTION_KERNEL in ("auto", "cudnn"):
      fiddlers.segments(graph, self.MAX_SEGMENTS_PER_ROW)
    fiddlers.remat(graph, self.CHECKPOINT_POLICY)
    if self.SHARD_SEQUENCE_OVER_TENSOR:
      fiddlers.cut_sequences(graph)
    fiddlers.stack(graph, self.USE_REPEATED_LAYER)
    if pipeline := self.pipeline():
      fiddlers.pipeline(graph, pipeline)
    return graph

  def max_steps(self) -> int:
    """Returns MAX_STEPS; with NUM_EPOCHS, 1 until `cli.epochs` has set MAX_STEPS."""
    if self.NUM_EPOCHS is None:
      return self.MAX_STEPS
    steps = self.values()["MAX_STEPS"].value
    return 1 if steps is UNSET else steps

  def quantization(self) -> str | None:
    """Returns the quantization of matmuls, a value of QUANTIZATION.

    Raises:
      UserError: USE_FP8 and QUANTIZATION contradict each other.
    """
    if not self.USE_FP8:
      return self.QUANTIZATION
    if self.QUANTIZATION not in (None, "fp8", "fp8_delayed"):
      raise UserError(f"USE_FP8=True, but QUANTIZATION={self.QUANTIZATION}: set one of them.")
    return self.QUANTIZATION or "fp8"

  def adapt(self, graph: fdl.Buildable):
    """Adds LoRA, if USE_LORA, to a graph that contains the model."""
    if self.USE_LORA:
      targets = self.LORA_TARGET_LAYERS
      fiddlers.lora(
        graph,
        rank=self.LORA_RANK,
        alpha=self.LORA_ALPHA,
        dropout=self.LORA_DROPOUT,
        roles=fiddlers.LORA_ROLES.get(targets) or [role.strip() for role in targets.split(",")],
        base=self.LORA_BASE_QUANTIZATION,
      )

  def restore(self) -> fdl.Config[Restore] | None:
    """Returns the source of initial weights; None: all are initialized."""
    if self.CHECKPOINT_RESTORE_PATH is None:
      return None
    return fdl.Config(
      Restore,
      path=self.CHECKPOINT_RESTORE_PATH,
      step=self.CHECKPOINT_RESTORE_STEP,
      include=self.CHECKPOINT_INCLUDE_RULES,
      ignore=(*self.CHECKPOINT_IGNORE_RULES, *([layers.lora.WEIGHTS] if self.USE_LORA else [])),
    )

  def pipeline(self) -> fdl.Config[layers.Pipeline] | None:
    """Returns the pipeline of the layers; None if there is one stage.

    Raises:
      UserError: Knobs contradict each other.
    """
    mesh = building.build(self.mesh(), source=f"what {type(self).__name__}.mesh() returns")
    size = mesh.axis("pipeline")
    stages = size if self.NUM_STAGES is None else self.NUM_STAGES
    if stages is None or size not in (None, stages):
      raise UserError(
        f"NUM_STAGES={self.NUM_STAGES}, but the axis pipeline of ICI_MESH_SHAPE x DCN_MESH_SHAPE is"
        f" {size or -1}: give both the same size."
      )
    if stages == 1:
      return None
    given = {self.NUM_VIRTUAL_STAGES, self.CIRCULAR_REPEAT} - {None}
    if len(given) > 1:
      raise UserError("NUM_VIRTUAL_STAGES and CIRCULAR_REPEAT differ: set one of them.")
    count = self.NUM_MICROBATCHES
    return fdl.Config(
      layers.Pipeline,
      schedule=self.PIPELINE_SCHEDULE,
      stages=stages,
      chunks=given.pop() if given else 1,
      microbatches=stages if count is None else count,
      recompute=self.PIPELINE_RECOMPUTE,
    )

  def callbacks(self) -> list[Callback]:
    """Returns the callbacks of training, which are not part of the graph or `config.json`.

    This is called more than once, so callbacks should open files in `on_start` only.
    """
    return []

  def objective(self) -> fdl.Config[Objective]:
    """Returns the training objective."""
    return fdl.Config(NextToken)

  def best(self) -> fdl.Config[Criterion] | None:
    """Returns the criterion of the best checkpoint; None without BEST_CHECKPOINT_METRIC."""
    metric = self.BEST_CHECKPOINT_METRIC
    if metric is None:
      return None
    mode = self.BEST_CHECKPOINT_MODE or ("min" if metric.endswith("log_pplx") else "max")
    patience = self.EARLY_STOPPING_PATIENCE
    return fdl.Config(Criterion, metric=metric, lowest=mode == "min", patience=patience)

  def model(self) -> fdl.Config[layers.Decoder]:
    """Returns the model; its output projection is the embedding table."""
    return fdl.Config(
      layers.Decoder,
      vocab_size=self.VOCAB_SIZE,
      dim=self.MODEL_DIMS,
      embedding=fdl.Partial(layers.Embedding, init=self.init()),
      dropout=self.dropout(self.EMBEDDING_DROPOUT_PROB),
      stack=self.stack(),
      norm=self.norm(),
    )

  def stack(self) -> fdl.Partial[layers.Stack]:
    """Returns the layers: repeats of the pattern, then its first layers for the remainder.

    Raises:
      UserError: The pattern is not a list of layers, or empty.
    """
    pattern: Any = self.pattern()
    if not isinstance(pattern, list | tuple) or not pattern:
      raise UserError(
        f"what {type(self).__name__}.pattern() returns is {graph_types.shown(pattern)}: expected a"
        " list of at least one layer."
      )
    repeats, rest = divmod(self.NUM_LAYERS, len(pattern))
    stack = fdl.Partial(layers.Stack, pattern=pattern, repeats=repeats)
    if rest:
      stack.epilogue = self.pattern()[:rest]
    return stack

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    """Returns the layers that are repeated."""
    return [self.block()]

  def block(self) -> fdl.Partial[layers.Block]:
    """Returns one layer."""
    return fdl.Partial(
      layers.Block,
      norm=self.norm(),
      attention=self.attention(),
      mlp=self.mlp(),
      dropout=self.dropout(self.DROPOUT_PROB),
    )

  def attention(self) -> fdl.Partial[layers.Attention]:
    """Returns the attention of a block."""
    return fdl.Partial(
      layers.Attention,
      num_heads=self.NUM_HEADS,
      head_dim=self.head_dim(),
      query=self.linear("query"),
      key=self.linear("key"),
      value=self.linear("value"),
      output=self.linear("output"),
    )

  def mlp(self) -> fdl.Partial[layers.Mlp]:
    """Returns the feed-forward layer of a block."""
    hidden = self.HIDDEN_DIMS
    return fdl.Partial(
      layers.Mlp,
      hidden_dim=4 * self.MODEL_DIMS if hidden is None else hidden,
      up=self.linear("up"),
      down=self.linear("down"),
    )

  def norm(self) -> fdl.Partial:
    """Returns the norm of blocks and of the final output."""
    return fdl.Partial(layers.RmsNorm)

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    """Returns a linear map of the blocks."""
    return fdl.Partial(layers.Linear, role=role, init=self.init())

  def init(self) -> fdl.Partial:
    """Returns the initializer of weights."""
    return fdl.Partial(layers.gaussian, std=self.INIT_STD)

  def dropout(self, rate: float) -> fdl.Partial[layers.Dropout] | None:
    """Returns a dropout layer; None for rate 0."""
    return fdl.Partial(layers.Dropout, rate=rate) if rate else None

  def head_dim(self) -> int:
    """Returns the width of a head.

    Raises:
      UserError: DIMS_PER_HEAD is None, and NUM_HEADS does not divide MODEL_DIMS.
    """
    if self.DIMS_PER_HEAD is not None:
      return self.DIMS_PER_HEAD
    if self.MODEL_DIMS % self.NUM_HEADS:
      raise UserError(
        f"MODEL_DIMS={self.MODEL_DIMS} is not a multiple of NUM_HEADS={self.NUM_HEADS}:"
        " set DIMS_PER_HEAD, or another NUM_HEADS."
      )
    return self.MODEL_DIMS // self.NUM_HEADS

  def optimizer(self) -> fdl.Config[optimizers.Optimizer]:
    """Returns the optimizer with its learning-rate schedule."""
    return fdl.Config(
      optimizers.adamw,
      learning_rate=self.schedule(),
      b1=self.ADAM_BETA1,
      b2=self.ADAM_BETA2,
      eps=self.ADAM_EPSILON,
      weight_decay=self.WEIGHT_DECAY,
      decayed=getattr(optimizers, self.WEIGHT_DECAY_ON),
      clip_norm=self.CLIP_GRADIENT_NORM_TO_VALUE,
      moment_dtype=self.ADAM_MOMENT_DTYPE,
      over_data=self.SHARD_OPTIMIZER_OVER_DATA,
      on_host=self.OPTIMIZER_ON_HOST,
    )

  def schedule(self) -> fdl.Config:
    """Returns the learning-rate schedule.

    Raises:
      UserError: The decay starts before the end of the warmup, or ends before it starts.
    """
    peak = self.LEARNING_RATE
    if self.LR_SCHEDULE == "constant":
      return fdl.Config(optimizers.constant, peak=peak)
    if self.LR_SCHEDULE == "linear_rampup_cosine_decay":
      function, prefix, warmup = optimizers.linear_rampup_cosine_decay, "COS", self.LR_COS_WARMUP
      start, end = self.LR_COS_DECAY_START, self.LR_COS_DECAY_END
      ratio = self.LR_COS_MIN_RATIO
    else:
      function, prefix = optimizers.linear_rampup_exponential_decay, "LRED"
      warmup, ratio = self.LR_LRED_WARMUP, self.LR_LRED_MIN_RATIO
      start, end = self.LR_LRED_DECAY_START, self.LR_LRED_DECAY_END
    steps = [("WARMUP", warmup), ("DECAY_START", start), ("DECAY_END", end)]
    given = [(f"LR_{prefix}_{name}", step) for name, step in steps if step is not None]
    for (name, step), (later, sooner) in itertools.pairwise(given):
      if sooner < step:
        raise UserError(
          f"{later}={sooner} is below {name}={step}: the learning rate rises for"
          f" LR_{prefix}_WARMUP steps, and falls from LR_{prefix}_DECAY_START to"
          f" LR_{prefix}_DECAY_END. Change one of them."
        )
    if end is None:
      end = max(self.max_steps(), start or 0)
    start = min(warmup + 1, ranges.INT32) if start is None else start
    return fdl.Config(
      function, peak=peak, warmup=warmup, decay_start=start, decay_end=end, min_ratio=ratio
    )

  def mesh(self) -> fdl.Config[MeshSpec]:
    """Returns the shape of the device mesh."""
    return fdl.Config(MeshSpec, ici=self.ICI_MESH_SHAPE, dcn=self.DCN_MESH_SHAPE)

  @classmethod
  def hugging_face(cls) -> hugging_face.Family | None:
    """Returns the conversion from and to Hugging Face; None if it has no such family."""
    return None

  def train_data(self) -> fdl.Config | None:
    """Returns the training data, a `data.Dataset`; None to evaluate only. See `datasets`."""
    raise UserError(f"{type(self).__name__} has no training data: subclass a mixin of datasets.py.")

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    """Returns the eval sets by name."""
    return {}

  def eval_set(self, dataset: fdl.Config, **options: Any) -> fdl.Config[EvalSet]:
    """Returns an eval set with the metrics of language models."""
    return fdl.Config(EvalSet, dataset=dataset, **options)
