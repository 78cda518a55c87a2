# SPDX-License-Identifier: Apache-2.0
"""Training in parts from Python: sample, forward and backward, update, save."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from paxlike import root_graph, run_folder, run_mode
from paxlike.api import error_messages, model
from paxlike.api.losses import Loss, Losses, LossResult
from paxlike.api.run import make, name_of
from paxlike.cli import error_diagnosis, flags, startup
from paxlike.config import knob_text
from paxlike.errors import UserError
from paxlike.processes import work_report

if TYPE_CHECKING:
  from paxlike.experiment import Experiment
  from paxlike.training.reinforcement.answers import Answer, Packed


class Session:
  """A model that a Python program samples from and trains, as in reinforcement learning.

  It is a context manager: until it ends, no other process may write to the folder. A new session in
  the same folder continues from the last `save`.

      with paxlike.Session("MyTask", "FOLDER") as session:
        for number, prompt in enumerate(prompts):
          answers = session.sample([prompt], num_samples=8, max_new_tokens=64, seed=number)[0]
          for answer in answers:
            answer.advantage = my_reward(session.text(answer)) - 0.5
          session.forward_backward(answers, "policy")
          session.optim_step()
        session.save()

  Attributes:
    step: Number of updates.
    tokenizer: Of the experiment's data; None if they have none.
  """

  @error_messages.for_python()
  def __init__(
    self,
    experiment: "type[Experiment] | Experiment | str",
    folder: str | os.PathLike[str],
    *,
    temperature: float = 1.0,
    num_slots: int = 64,
    **knobs: Any,
  ):
    """Restores or initializes the weights.

    Args:
      experiment: As for `paxlike.train`; of its data, only tokenizer and template are used.
      folder: Of checkpoints; created if missing.
      temperature: Of sampling; log-probabilities are those of the distributions sampled from.
      num_slots: Answers that are decoded at the same time.
      **knobs: Overrides of its knobs.

    Raises:
      UserError: The experiment, a knob or the folder is invalid.
    """
    options = flags.Options(
      mode="train",
      fdl_config=name_of(experiment),
      knobs=knob_text.pairs(knobs),
      job_log_dir=os.fspath(folder),
    )
    if num_slots < 1:
      raise UserError(f"num_slots={num_slots}: expected at least 1.")
    self._num_slots, self._is_open = num_slots, True
    self._stack = contextlib.ExitStack()
    with contextlib.ExitStack() as opening:
      opening.enter_context(work_report.reporting_failure(leave=False))
      stage = opening.enter_context(error_diagnosis.explained(options, entry=True))
      startup.set_up_jax(options)
      work_report.leave_at_exit()
      stage.experiment = made = make(options, experiment=experiment, knobs=knobs)
      graph = root_graph.of(options, made)
      self._trainer = run_mode.build_trainer(graph)
      self._files = functools.partial(_files, made, graph)
      self._open(opening, os.fspath(folder), temperature)
      self._stack = opening.pop_all()

  def _open(self, opening: contextlib.ExitStack, folder: str, temperature: float):
    """Enters the folder, and loads the state."""
    import jax

    from paxlike.inference.sampling import Sampling
    from paxlike.processes import lease
    from paxlike.telemetry.run_log import RunLog
    from paxlike.training.forward_backward import ForwardBackward
    from paxlike.training.reinforcement import preflight

    if jax.process_count() > 1:
      raise UserError("paxlike.Session is for one process: start only one.")
    trainer, sampling = self._trainer, Sampling(temperature=temperature)
    preflight.check_passes(trainer, sampling)
    path = opening.enter_context(run_folder.entered(folder))
    owner: Any = opening.enter_context(lease.owned(path))
    self._log = RunLog(path, write_summaries=False, check_owner=owner.check)
    source = trainer.state_source(path)
    self._saved = opening.enter_context(
      source.checkpoints(keep=trainer.keep, check_owner=owner.check)
    )
    opening.enter_context(jax.set_mesh(trainer.devices))
    self._folder = path
    self._state, position, self._provenance = source.state(self._saved, self._log)
    if position:
      raise UserError(
        f"the checkpoints in {path} are of a run, which a session would break: name another folder,"
        " and this one by CHECKPOINT_RESTORE_PATH."
      )
    options: Any = {"compiler_options": dict(trainer.execution.compiler_options)}
    self._programs = ForwardBackward(
      trainer.definition, trainer.optimizer, sampling=sampling, **options
    )
    self._losses = Losses(**options)
    self._sampling = sampling
    self._sampler: Any = None
    self._gradients: Any = None
    self._loss: Any = None
    self.tokenizer = trainer.data.tokenizer

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception: Any):
    self.close(*exception)

  def close(self, *exception: Any):
    """Releases the folder; updates since the last `save` are lost."""
    self._is_open = False
    self._stack.__exit__(*(exception or (None, None, None)))

  def _check_open(self):
    if not self._is_open:
      raise UserError("the session is closed: open a new one in its folder.")

  @property
  def step(self) -> int:
    """The number of updates."""
    return int(self._state.step)

  @error_messages.for_python()
  def answer(self, prompt: Any, text: Any, *, advantage: float = 0.0) -> "Answer":
    """Returns an answer to train on.

    Args:
      prompt: A text, ids, or messages; see `sample`.
      text: Its text, after which the end token is added, or its ids.
      advantage: See `forward_backward`. The loss "policy" also needs its `log_probabilities`: set
        them, for example to `log_probabilities([answer])[0]`.

    Raises:
      UserError: A text is given and the experiment's data has no tokenizer, or there is no token.
    """
    from paxlike.training.reinforcement.answers import Answer

    if isinstance(text, str):
      if self.tokenizer is None:
        raise UserError(f"{text!r:.40}: the experiment's data has no tokenizer: give ids.")
      end = self._end_ids[:1] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
      tokens = [*map(int, self.tokenizer.encode(text)), *end]
    else:
      most = self._trainer.model.vocab_size
      tokens = model.ids_of(text, vocab_size=most, what="an answer").tolist()
    if not tokens:
      raise UserError("an answer to train on needs at least one token.")
    (prompt,) = self._tokens([prompt])
    answer = Answer(prompt=prompt, max_tokens=len(tokens), tokens=tokens)
    answer.advantage, answer.has_ended = advantage, tokens[-1] in self._end_ids
    answer.log_probabilities = np.zeros(len(tokens), np.float32)
    self._check([answer])
    return answer

  @error_messages.for_python()
  def sample(
    self, prompts: Sequence[Any], *, max_new_tokens: int, num_samples: int = 1, seed: int = 0
  ) -> "list[list[Answer]]":
    """Samples answers from the distribution that `forward_backward` trains.

    Args:
      prompts: Texts, lists of ids, or lists of messages (see `Model.generate`).
      max_new_tokens: An answer that has not ended by then is cut off.
      num_samples: Answers to each prompt.
      seed: Of the sampling; the same seed draws the same answers from the same weights.

    Returns:
      For each prompt, its answers with `tokens`, `log_probabilities` and `has_ended`.

    Raises:
      UserError: A prompt is invalid, or too long.
    """
    from paxlike.training.reinforcement.answers import Answer

    least = {"max_new_tokens": 1, "num_samples": 1, "seed": 0}
    for name, value in zip(least, (max_new_tokens, num_samples, seed), strict=True):
      if value < least[name]:
        raise UserError(f"{name}={value}: expected at least {least[name]}.")
    given = self._tokens(prompts)
    rng = np.random.default_rng(seed)
    groups = [
      [
        Answer(prompt=tokens, max_tokens=max_new_tokens, record=n, seed=int(rng.integers(2**31)))
        for _ in range(num_samples)
      ]
      for n, tokens in enumerate(given)
    ]
    answers = [answer for group in groups for answer in group]
    self._check(answers)
    if answers:
      self._sampler_of().sample(self._programs.prepare(self._state), answers)
    return groups

  @error_messages.for_python()
  def forward_backward(
    self, answers: "Sequence[Answer]", loss: Literal["cross_entropy", "policy"] | Loss
  ) -> LossResult:
    """Adds the gradients of a loss, a mean over the tokens of `answers`, to those of the next step.

    Args:
      answers: Those to train on.
      loss: "cross_entropy"; "policy": the clipped policy gradient of the answers' `advantage`, with
        the probability ratio to their `log_probabilities` (see `Grpo`); or a `losses.Loss`. It gets
        the `values` of a model with a value head, and can train them.

    Raises:
      UserError: There are no answers, one is too long, or the loss returns something else.
    """
    from paxlike.training.reinforcement.answers import of_loss

    self._check(answers, trained=True)
    packed = self._packed(answers)
    sizes = [len(answer.tokens) for answer in answers]
    parts = of_loss(answers, [1 / sum(sizes)] * len(answers))
    spread = {name: packed.spread(values) for name, values in parts.items()}
    put, count = self._trainer.placer.put, len(packed.batches)
    found = self._programs.gradients(
      self._programs.prepare(self._state),
      [put(batch) for batch in packed.batches],
      [put({name: of[number] for name, of in spread.items()}) for number in range(count)],
      self._losses.derivative(loss),
    )
    self._gradients = self._programs.accumulate(self._gradients, found.total)
    self._loss = found.loss if self._loss is None else self._loss + found.loss
    metrics = {name: float(pair[0] / pair[1]) for name, pair in found.sums.items()}
    scored = packed.collect([np.asarray(one) for one in found.log_probabilities])
    return LossResult(float(found.loss), scored, metrics)

  @error_messages.for_python()
  def log_probabilities(self, answers: "Sequence[Answer]") -> list[np.ndarray]:
    """Returns the log-probabilities of the tokens of each answer, float32.

    Raises:
      UserError: There are no answers, or one is too long.
    """
    self._check(answers, trained=True)
    packed, prepared = self._packed(answers), self._programs.prepare(self._state)
    sampler = self._sampler_of()
    scored = [sampler.score(prepared, batch).scores for batch in packed.batches]
    return packed.collect([np.asarray(scores.log_probabilities_BT) for scores in scored])

  @error_messages.for_python()
  def optim_step(self) -> dict[str, float]:
    """Updates the weights with the sum of the gradients since the last update.

    Returns:
      `grad_norm`, `learning_rate` (by the experiment's schedule) and `skipped`: whether the
      gradients were not finite, so that nothing was changed.

    Raises:
      UserError: `forward_backward` has not been called.
    """
    self._check_open()
    if self._gradients is None:
      raise UserError("optim_step needs gradients: call forward_backward before.")
    gradients, loss, self._gradients, self._loss = self._gradients, self._loss, None, None
    self._state, metrics = self._programs.update(self._state, gradients, loss)
    return {name: float(value) for name, value in metrics.items()}

  @error_messages.for_python()
  def save(self) -> int:
    """Writes a checkpoint of the weights and the optimizer; returns its step.

    `paxlike.load` reads it, a run starts from it by CHECKPOINT_RESTORE_PATH, and a session in the
    same folder continues from it. Gradients that no `optim_step` has used are not in it.

    Raises:
      UserError: It cannot be written; older checkpoints are intact.
    """
    from paxlike import file_io
    from paxlike.checkpoints.array_names import flatten
    from paxlike.layers.stack import layout_of

    self._check_open()
    if self.step in self._saved.steps():
      return self.step
    with run_folder.writing(self._folder):
      for name, content in (self._files() | self._provenance).items():
        if content is not None:
          (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
          file_io.write(self._folder / name, content)
    state = flatten(dataclasses.replace(self._state, frozen={}, reference={}))
    layout = layout_of(self._trainer.model)
    self._saved.save(self.step, state, layout=layout, train_input={})
    self._saved.wait()
    return self.step

  def text(self, answer: "Answer") -> str:
    """Returns the text of an answer, without its end token."""
    if self.tokenizer is None:
      raise UserError("text: the experiment's data has no tokenizer: read the answer's tokens.")
    tokens = answer.tokens[:-1] if answer.has_ended else answer.tokens
    return self.tokenizer.continuation(answer.prompt, tokens)

  @functools.cached_property
  def _end_ids(self) -> list[int]:
    ids = set() if self.tokenizer is None else set(self.tokenizer.stop_ids)
    if (renderer := self._trainer.data.prompt_renderer) is not None:
      ids |= {*renderer.turn_end.ids}
    return sorted(ids)

  def _tokens(self, prompts: Sequence[Any]) -> list[np.ndarray]:
    """Returns the tokens of each prompt."""
    from paxlike.inference import decoding
    from paxlike.training import decode_mode

    given, is_one = model.prompts_of(prompts, vocab_size=self._trainer.model.vocab_size)
    if is_one:
      raise UserError(f"prompts={prompts!r:.60}: expected a list of prompts, not a single one.")
    renderer = decode_mode.prompt_renderer_for(self._trainer, given)
    most = self._trainer.data.seq_len
    return [decoding.tokens_of(one, self.tokenizer, renderer, max_len=most) for one in given]

  def _check(self, answers: "Sequence[Answer]", *, trained: bool = False):
    from paxlike.training.reinforcement.answers import Answer

    self._check_open()
    if trained and not answers:
      raise UserError("there are no answers.")
    for answer in answers:
      if not isinstance(answer, Answer):
        raise UserError(
          f"expected a list of answers, not {answer!r:.60}; sample returns one for each prompt."
        )
      size = len(answer.prompt) + (len(answer.tokens) if trained else answer.max_tokens) - 1
      if size > self._trainer.data.seq_len:
        raise UserError(
          f"an answer with its prompt takes {size} tokens, more than"
          f" MAX_SEQ_LEN={self._trainer.data.seq_len}."
        )

  def _packed(self, answers: "Sequence[Answer]") -> "Packed":
    from paxlike.training.reinforcement.answers import pack

    placer = self._trainer.placer
    return pack(
      answers,
      batch_size=placer.batch_size,
      seq_len=self._trainer.data.seq_len,
      max_segments=placer.max_segments,
    )

  def _sampler_of(self) -> Any:
    from paxlike.training.reinforcement.drafts import Drafter
    from paxlike.training.reinforcement.sampler import Sampler

    if self._sampler is None:
      trainer = self._trainer
      drafter = Drafter(
        trainer.definition,
        self._state.weights,
        num_slots=self._num_slots,
        seq_len=trainer.data.seq_len,
        end_ids=self._end_ids,
        sampling=self._sampling,
        phase="sample",
        compiler_options=trainer.execution.compiler_options,
      )
      self._sampler = Sampler(drafter, self._programs, trainer.placer, seq_len=trainer.data.seq_len)
    return self._sampler


def _files(experiment: Any, graph: Any) -> dict[str, str | bytes | None]:
  from paxlike.cli import config_files

  return dict(config_files.of(experiment, graph))
