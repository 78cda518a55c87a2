# SPDX-License-Identifier: Apache-2.0
"""Extends paxlike without editing it: one example of each kind, and an experiment with all of them.

    python examples/extensions.py runs/sums

trains a small model on sums such as "12+7=19". The classes and functions in a graph must be at the
top level of a module, because `config.json` refers to them by name. A command that reads it needs
`--fdl_allow_modules=examples.extensions`, and `paxlike.load` needs the same in `allow_modules`.
"""

import csv
import dataclasses
import functools
import sys
from collections.abc import Iterator

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

import paxlike
from paxlike import layers
from paxlike.data.corpus import Corpus
from paxlike.data.packing import PackedRows
from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizers.tokenizer import ByteTokenizer
from paxlike.experiments.llama import Llama
from paxlike.layers.decoder import Batch, context_of
from paxlike.training import evaluation, objectives, optimizers


# A schedule: completed updates -> learning rate.
def inverse_root(*, peak: float, warmup: int) -> optimizers.Schedule:
  """Linear warmup to `peak` in `warmup` steps, then decay with the inverse square root of steps."""

  def rate(count: jax.typing.ArrayLike) -> jax.Array:
    step = jnp.asarray(count, jnp.float32) + 1
    return peak * jnp.minimum(step / warmup, jnp.sqrt(warmup / step))

  return rate


class WithLion(paxlike.Experiment):
  """An optimizer: any optax transformation, and the schedule that the log shows."""

  LION_WARMUP: int = 10  #: Warmup steps of the learning rate.

  def schedule(self) -> fdl.Config:
    return fdl.Config(inverse_root, peak=self.LEARNING_RATE, warmup=self.LION_WARMUP)

  def optimizer(self) -> fdl.Config[optimizers.Optimizer]:
    rate = self.schedule()
    transform = fdl.Config(
      optax.chain,
      fdl.Config(optax.clip_by_global_norm, 1.0),
      fdl.Config(optax.lion, learning_rate=rate, b2=0.98),
    )
    return fdl.Config(optimizers.Optimizer, transform=transform, learning_rate=rate)


# Registered under a name, the schedule can be chosen for every experiment:
# --fdl.LR_SCHEDULE=inverse_root. `register_optimizer` does the same for --fdl.OPTIMIZER.
@optimizers.register_schedule("inverse_root")
def inverse_root_of(experiment: paxlike.Experiment) -> fdl.Config:
  return fdl.Config(inverse_root, peak=experiment.LEARNING_RATE, warmup=experiment.LR_COS_WARMUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidencePenalty(objectives.Objective):
  """An objective: cross-entropy less `factor` times the entropy of the prediction.

  Source: Pereyra et al., 2017 (arXiv:1701.06548).
  """

  factor: float

  def weight(self, batch):
    return batch["weights"].sum()

  def total(self, model, reference, batch, dropout):
    x_BTD, _, aux = model.hidden(batch["inputs"], context_of(batch, dropout))
    loss_BT = model.map_logits(self._loss, x_BTD, batch["targets"])
    return (loss_BT * batch["weights"]).sum(), aux

  def _loss(self, logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    logs_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
    right_BT = jnp.take_along_axis(logs_BTV, targets_BT[..., None], axis=-1)[..., 0]
    entropy_BT = -(jnp.exp(logs_BTV) * logs_BTV).sum(-1)
    return -right_BT - self.factor * entropy_BT


class Penalized(paxlike.Experiment):
  """A mixin that trains with a penalty on confident predictions."""

  CONFIDENCE_PENALTY: float = 0.1  #: Factor of the entropy.

  def objective(self) -> fdl.Config[objectives.Objective]:
    return fdl.Config(ConfidencePenalty, factor=self.CONFIDENCE_PENALTY)


# A metric: a sum and a weight for each sequence; the quotient of their totals is reported.
def bits(scores: evaluation.Scores, batch: Batch) -> evaluation.Sums:
  """The cross-entropy in bits per token."""
  weights_BT = batch["weights"]
  return {"bits": ((scores.loss_BT * weights_BT).sum(-1) / np.log(2), weights_BT.sum(-1))}


class ScaledMlp(layers.Mlp):
  """A layer variant: a feed-forward layer whose output has a trainable scale for each dim."""

  def __init__(self, dim: int, *, initial: float = 0.1, **parts):
    super().__init__(dim, **parts)
    init = functools.partial(layers.constant, value=initial)
    self.scale = self.weight({"model": dim}, init=init)

  def __call__(self, x_BTD, context=None):
    y_BTD, aux = super().__call__(x_BTD, context)
    return y_BTD * self.scale[...].astype(y_BTD.dtype), aux


class ScaledLlama(Llama):
  """LLaMA with `ScaledMlp`."""

  def mlp(self) -> fdl.Partial[layers.Mlp]:
    mlp = super().mlp()
    fdl.update_callable(mlp, ScaledMlp)
    return mlp


class Sums(Corpus):
  """A data source: documents as ids, which paxlike shuffles and packs; runs resume exactly."""

  def __init__(self, *, count: int, seed: int = 0):
    self.count, self.seed = count, seed

  @property
  def tokenizer(self):
    return ByteTokenizer()

  @property
  def vocab_size(self):
    return self.tokenizer.vocab_size

  def index(self) -> TokenIndex:
    documents = [self.tokenizer.encode(text) for text in self._texts()]
    offsets = np.cumsum([0, *map(len, documents)])
    return TokenIndex(np.concatenate(documents), offsets, {})

  def _texts(self) -> Iterator[str]:
    pairs = np.random.default_rng(self.seed).integers(0, 100, (self.count, 2))
    return (f"{a}+{b}={a + b}" for a, b in pairs)


class SumsData(paxlike.Experiment):
  """A mixin that trains on `Sums`."""

  NUM_SUMS: int = 10_000  #: Sums in the training data.

  def train_data(self) -> fdl.Config:
    return self.sums(count=self.NUM_SUMS, seed=0)

  def eval_data(self):
    metrics = (evaluation.language_model, bits)
    return {"sums": self.eval_set(self.sums(count=100, seed=1), metrics=metrics)}

  def sums(self, *, count: int, seed: int) -> fdl.Config:
    """Sequences of sums."""
    corpus = fdl.Config(Sums, count=count, seed=seed)
    return fdl.Config(PackedRows, corpus=corpus, seq_len=self.MAX_SEQ_LEN, seed=self.RANDOM_SEED)


class Stop(paxlike.Callback):
  """A callback: ends the run if the loss exceeds twice its first value."""

  def on_start(self, step, folder):
    self.first = None

  def on_step(self, step, metrics):
    self.first = metrics["loss"] if self.first is None else self.first
    if metrics["loss"] > 2 * self.first:
      raise paxlike.RunError(f"the loss of step {step} is {metrics['loss']:.2f}: it diverges.")


class CsvTracker(paxlike.Callback):
  """A tracker: writes the losses as CSV."""

  def on_start(self, step, folder):
    self.file = (folder / "losses.csv").open("a")
    self.table = csv.writer(self.file)

  def on_record(self, record):
    if "loss" in record:  # A sample has none.
      self.table.writerow([record["kind"], record["updates"], record["loss"]])

  def on_end(self, status):
    self.file.close()


class Tiny:
  """A mixin of sizes that train in seconds."""

  VOCAB_SIZE = 257
  NUM_LAYERS = 2
  MODEL_DIMS = 64
  HIDDEN_DIMS = 128
  NUM_HEADS = 4
  MAX_SEQ_LEN = 32
  PERCORE_BATCH_SIZE = 8
  MAX_STEPS = 200


class TinySums(SumsData, Tiny, WithLion, Penalized, ScaledLlama):
  """An experiment with all parts above."""

  LEARNING_RATE = 1e-3

  def callbacks(self) -> list[paxlike.Callback]:
    return [Stop(), CsvTracker()]


if __name__ == "__main__":
  run = paxlike.train(TinySums, sys.argv[1])
  print(run.metrics())
  print(run.load().generate("12+7=", max_new_tokens=4, stop="\n"))
