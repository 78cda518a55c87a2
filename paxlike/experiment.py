# SPDX-License-Identifier: Apache-2.0
"""Experiment: the knobs of a run, and the methods that turn them into one Fiddle graph.

A family overrides the methods that differ; a recipe sets knobs. A value derived from knobs is
computed in the method that uses it, so that subclass, mixin and command line all reach it.
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
  VOCAB_SIZE: ranges.Size = UNSET  #: Token ids that the model knows.
  MAX_SEQ_LEN: ranges.Size = 2048  #: Tokens of a sequence.
  NUM_LAYERS: ranges.Depth = UNSET  #: Transformer blocks.
  MODEL_DIMS: ranges.Size = UNSET  #: Width of the residual stream.
  HIDDEN_DIMS: ranges.Size | None = None  #: Width of the feed-forward layer. None: 4 x MODEL_DIMS.
  NUM_HEADS: ranges.Size = UNSET  #: Attention heads.
  DIMS_PER_HEAD: ranges.Size | None = None  #: Width of a head. None: MODEL_DIMS / NUM_HEADS.
  INIT_STD: ranges.Weight = 0.02  #: Standard deviation of initial weights.
  DROPOUT_PROB: ranges.Probability = 0.0  #: Dropout of each block's two outputs.
  EMBEDDING_DROPOUT_PROB: ranges.Probability = 0.0  #: Dropout of the embedded tokens.

  # How it is computed.
  FPROP_DTYPE: ranges.ComputeDtype = "bfloat16"  #: Compute dtype.
  #: What weights are held in between steps; bfloat16 with stochastic rounding.
  WEIGHT_DTYPE: Literal["float32", "bfloat16"] = "float32"
  #: Multiply in 8 bits in the linear maps and experts of blocks: fp8 with the scales of what is
  #: multiplied, fp8_delayed with those of the last steps, mxfp8 (no experts); int8. None: no.
  QUANTIZATION: Literal["fp8", "fp8_delayed", "mxfp8", "int8"] | None = None
  USE_FP8: bool = False  #: QUANTIZATION=fp8.
  ENABLE_TE: bool = False  #: In linear maps of blocks multiply by NVIDIA's Transformer Engine.
  USE_REPEATED_LAYER: bool | None = None  #: Scan over layers. None: on more than one device.
  #: What the backward pass finds saved; the rest is recomputed. OFFLOAD_...: in the host's memory.
  CHECKPOINT_POLICY: Policy = "SAVE_EVERYTHING"
  #: What computes attention. auto: ring where the mesh axis context is longer than 1, else cudnn or
  #: splash where they can, xla on CPUs, else xla_chunked.
  ATTENTION_KERNEL: Literal[
    "auto", "xla", "xla_chunked", "cudnn", "splash", "tokamax", "ring", "gathered"
  ] = "auto"
  #: Documents of a packed row that the kernel cudnn has room for.
  MAX_SEGMENTS_PER_ROW: ranges.Size = 64
  #: Mesh [data, fsdp, tensor] within a slice or node, or {axis: size}; -1 fills.
  ICI_MESH_SHAPE: tuple[ranges.AxisSize, ...] | dict[str, ranges.AxisSize] = (-1, 1, 1)
  #: Mesh across slices or nodes.
  DCN_MESH_SHAPE: tuple[ranges.AxisSize, ...] | dict[str, ranges.AxisSize] = (1, 1, 1)
  #: Order of forwards and backwards where the mesh axis pipeline is longer than 1.
  PIPELINE_SCHEDULE: Literal["gpipe", "circular", "1f1b", "interleaved_1f1b"] = "1f1b"
  NUM_STAGES: ranges.Positive | None = None  #: Stages of the pipeline. None: the size of that axis.
  #: Groups of layers that a stage of circular and interleaved_1f1b holds.
  NUM_VIRTUAL_STAGES: ranges.Positive | None = None
  CIRCULAR_REPEAT: ranges.Positive | None = None  #: Pax's name of NUM_VIRTUAL_STAGES.
  #: Parts of a batch on their way at once. None: NUM_STAGES.
  NUM_MICROBATCHES: ranges.Positive | None = None
  #: Keep of a group's forward only its input; else what CHECKPOINT_POLICY saves.
  PIPELINE_RECOMPUTE: bool = True

  #: Cut norms and residuals along the sequence over the mesh axis tensor too.
  SHARD_SEQUENCE_OVER_TENSOR: bool = False

  # Batch.
  #: Sequences a device and optimizer step; may be a fraction.
  PERCORE_BATCH_SIZE: ranges.Batch = UNSET
  #: Parts of the batch that are computed one after another.
  GRADIENT_ACCUMULATION_STEPS: ranges.Size = 1

  # Optimizer.
  LEARNING_RATE: ranges.Rate = UNSET  #: The schedule's peak.
  LR_SCHEDULE: Literal[  #: Its form.
    "linear_rampup_cosine_decay", "linear_rampup_exponential_decay", "constant"
  ] = "linear_rampup_cosine_decay"
  LR_COS_WARMUP: ranges.NonNegative = 4000  #: Steps of the cosine schedule's linear rise.
  #: Step at which it starts to fall. None: LR_COS_WARMUP + 1.
  LR_COS_DECAY_START: ranges.NonNegative | None = None
  #: Step from which it is constant. None: MAX_STEPS.
  LR_COS_DECAY_END: ranges.NonNegative | None = None
  LR_COS_MIN_RATIO: ranges.Fraction = 0.1  #: Its last value as a share of the peak.
  LR_LRED_WARMUP: ranges.NonNegative = 4000  #: The same of the exponential schedule.
  LR_LRED_DECAY_START: ranges.NonNegative | None = None  #: None: LR_LRED_WARMUP + 1.
  LR_LRED_DECAY_END: ranges.NonNegative | None = None  #: None: MAX_STEPS.
  LR_LRED_MIN_RATIO: ranges.Epsilon = 0.1  #: Its last value as a share of the peak.
  ADAM_BETA1: ranges.Probability = 0.9  #: Decay of the mean of gradients.
  ADAM_BETA2: ranges.Probability = 0.95  #: Decay of the mean of squared gradients.
  ADAM_EPSILON: ranges.Epsilon = 1e-8  #: Added outside the root.
  #: What the means are held in; bfloat16 with stochastic rounding.
  ADAM_MOMENT_DTYPE: Literal["float32", "bfloat16"] = "float32"
  #: Cut the optimizer's state over the mesh axis data too (ZeRO-1).
  SHARD_OPTIMIZER_OVER_DATA: bool = False
  #: Keep the optimizer's state in the memory of hosts, and bring it for each update.
  OPTIMIZER_ON_HOST: bool = False
  WEIGHT_DECAY: ranges.Weight = 0.1  #: Decoupled weight decay.
  WEIGHT_DECAY_ON: Literal["everything", "matrices"] = "everything"  #: What decays.
  #: Largest global gradient norm. None: no clip.
  CLIP_GRADIENT_NORM_TO_VALUE: ranges.PositiveFloat | None = 1.0

  # Run.
  MAX_STEPS: ranges.NonNegative = UNSET  #: Optimizer steps.
  #: Instead of MAX_STEPS: how often the run goes through its training data. None: MAX_STEPS holds.
  NUM_EPOCHS: ranges.PositiveFloat | None = None
  RANDOM_SEED: ranges.NonNegative = 1234  #: Of weights, dropout and the order of the data.
  SUMMARY_INTERVAL_STEPS: ranges.Positive = 100  #: Steps between log lines.
  #: Steps between evaluations. 0: only after the last.
  EVAL_INTERVAL_STEPS: ranges.NonNegative = 100
  #: Steps between checkpoints. 0: only after the last.
  CHECKPOINT_EVERY_N_STEPS: ranges.NonNegative = 5000
  CHECKPOINT_MAX_TO_KEEP: ranges.Positive | None = 10  #: Checkpoints kept, the newest. None: all.
  #: SET/METRIC of the evaluation, as validation/log_pplx, by which the best checkpoint is kept too.
  BEST_CHECKPOINT_METRIC: ranges.Name | None = None
  #: Which of its values is the best. None: min of log_pplx, max of others.
  BEST_CHECKPOINT_MODE: Literal["min", "max"] | None = None
  #: Evaluations in a row without a better one that end the run. None: it goes on to MAX_STEPS.
  EARLY_STOPPING_PATIENCE: ranges.Positive | None = None
  #: Abort after so many steps without a finite gradient.
  MAX_SKIPPED_STEPS_IN_A_ROW: ranges.Positive = 10
  #: Seconds without progress after which the job ends with status 75, so that a launcher starts it
  #: again. None: from the times so far, at least 60, and no limit while compiling. 0: none.
  STALL_TIMEOUT: ranges.Seconds | None = None
  #: Seconds between two writings of all threads' stacks into the run's folder. None: only of a
  #: stall, and on SIGUSR1.
  STACK_TRACE_INTERVAL: ranges.Interval | None = None
  #: Weights to start from: the folder of a run, or of a converted model. None: all are drawn.
  CHECKPOINT_RESTORE_PATH: ranges.Path | None = None
  CHECKPOINT_RESTORE_STEP: ranges.NonNegative | None = None  #: Its checkpoint. None: the newest.
  CHECKPOINT_INCLUDE_RULES: tuple[str, ...] = ("",)  #: Patterns of the weights to take.
  CHECKPOINT_IGNORE_RULES: tuple[str, ...] = ()  #: Patterns of those that are drawn all the same.
  USE_LORA: bool = False  #: Train low-rank adapters of linear maps, and nothing else.
  LORA_RANK: ranges.Size = 8  #: Their inner width.
  LORA_ALPHA: ranges.Factor | None = None  #: They are scaled by LORA_ALPHA / LORA_RANK. None: by 1.
  LORA_DROPOUT: ranges.Probability = 0.0  #: Dropout of what they are given.
  LORA_BASE_QUANTIZATION: Literal["int8", "nf4"] | None = (
    None  #: How the matrices of the base are held (QLoRA). None: as they are computed with.
  )
  #: all, attention or mlp, or the roles of linear maps: query,up.
  LORA_TARGET_LAYERS: ranges.Name = "all"
  SAMPLE_PROMPT: str | None = None  #: Text that the trained model continues. None: no sample.

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
    """Optimizer steps; of NUM_EPOCHS they are not known before `cli.epochs` has counted them."""
    if self.NUM_EPOCHS is None:
      return self.MAX_STEPS
    steps = self.values()["MAX_STEPS"].value
    return 1 if steps is UNSET else steps

  def quantization(self) -> str | None:
    """In what linear maps multiply, where not in the compute dtype.

    Raises:
      UserError: Two knobs say two things.
    """
    if not self.USE_FP8:
      return self.QUANTIZATION
    if self.QUANTIZATION not in (None, "fp8", "fp8_delayed"):
      raise UserError(f"USE_FP8=True, but QUANTIZATION={self.QUANTIZATION}: set one of them.")
    return self.QUANTIZATION or "fp8"

  def adapt(self, graph: fdl.Buildable):
    """Adds the adapters, if there are to be any, to a model or all that it is part of."""
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
    """The weights that a new run starts from, where they are not all drawn."""
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
    """The stages that the layers are spread over, if there are several.

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
      raise UserError("NUM_VIRTUAL_STAGES and CIRCULAR_REPEAT say two things: set one of them.")
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
    """What is called while a run trains. They are no part of the graph, nor of `config.json`.

    This is called more than once: what a callback opens, its `on_start` opens.
    """
    return []

  def objective(self) -> fdl.Config[Objective]:
    """What training makes small."""
    return fdl.Config(NextToken)

  def best(self) -> fdl.Config[Criterion] | None:
    """By what the best checkpoint is known, if one is to be."""
    metric = self.BEST_CHECKPOINT_METRIC
    if metric is None:
      return None
    mode = self.BEST_CHECKPOINT_MODE or ("min" if metric.endswith("log_pplx") else "max")
    patience = self.EARLY_STOPPING_PATIENCE
    return fdl.Config(Criterion, metric=metric, lowest=mode == "min", patience=patience)

  def model(self) -> fdl.Config[layers.Decoder]:
    """The whole model; its output projection is the embedding's table."""
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
    """The layers: the pattern over and over, and at the end as much of it as is left.

    Raises:
      UserError: The pattern is no list of layers.
    """
    pattern: Any = self.pattern()
    if not isinstance(pattern, list | tuple) or not pattern:
      raise UserError(
        f"what {type(self).__name__}.pattern() returns is {graph_types.shown(pattern)}: expected a"
        " list of a layer or more."
      )
    repeats, rest = divmod(self.NUM_LAYERS, len(pattern))
    stack = fdl.Partial(layers.Stack, pattern=pattern, repeats=repeats)
    if rest:
      stack.epilogue = self.pattern()[:rest]
    return stack

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    """The layers that repeat."""
    return [self.block()]

  def block(self) -> fdl.Partial[layers.Block]:
    """One layer."""
    return fdl.Partial(
      layers.Block,
      norm=self.norm(),
      attention=self.attention(),
      mlp=self.mlp(),
      dropout=self.dropout(self.DROPOUT_PROB),
    )

  def attention(self) -> fdl.Partial[layers.Attention]:
    """The attention of a block."""
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
    """The feed-forward part of a block."""
    hidden = self.HIDDEN_DIMS
    return fdl.Partial(
      layers.Mlp,
      hidden_dim=4 * self.MODEL_DIMS if hidden is None else hidden,
      up=self.linear("up"),
      down=self.linear("down"),
    )

  def norm(self) -> fdl.Partial:
    """Each block's norms and the last one."""
    return fdl.Partial(layers.RmsNorm)

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    """A linear map of the blocks."""
    return fdl.Partial(layers.Linear, role=role, init=self.init())

  def init(self) -> fdl.Partial:
    """How weights are drawn."""
    return fdl.Partial(layers.gaussian, std=self.INIT_STD)

  def dropout(self, rate: float) -> fdl.Partial[layers.Dropout] | None:
    """A dropout layer, none for rate 0."""
    return fdl.Partial(layers.Dropout, rate=rate) if rate else None

  def head_dim(self) -> int:
    """Width of a head.

    Raises:
      UserError: It is to be derived, and the heads do not divide the model's width.
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
    """The optimizer with its schedule."""
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
    """The learning rate over steps.

    Raises:
      UserError: It is to fall before it has risen, or to end before it falls.
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
    """The device mesh."""
    return fdl.Config(MeshSpec, ici=self.ICI_MESH_SHAPE, dcn=self.DCN_MESH_SHAPE)

  @classmethod
  def hugging_face(cls) -> hugging_face.Family | None:
    """How Hugging Face stores the family; None if it has no such thing."""
    return None

  def train_data(self) -> fdl.Config | None:
    """The training data, a `data.Dataset`; None to evaluate only. A data mixin gives it."""
    raise UserError(f"{type(self).__name__} has no training data: subclass a mixin of datasets.py.")

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    """What is evaluated, by name."""
    return {}

  def eval_set(self, dataset: fdl.Config, **options: Any) -> fdl.Config[EvalSet]:
    """Evaluates `dataset` with the metrics of language models."""
    return fdl.Config(EvalSet, dataset=dataset, **options)
