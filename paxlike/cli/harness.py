# SPDX-License-Identifier: Apache-2.0
"""paxlike models in EleutherAI's lm-evaluation-harness (Gao et al.); needs the extra `lm_eval`.

    python -m paxlike.cli.harness --model paxlike --model_args folder=DIR --tasks hellaswag

runs the harness's own program with the model `paxlike` registered. DIR is the folder of a run, or
one that `paxlike-convert` wrote. From Python:
`lm_eval.simple_evaluate(PaxlikeLM(folder="DIR"), ...)`.
"""

import collections
import dataclasses
import json
import pathlib
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

try:
  from lm_eval.api.model import TemplateLM
  from lm_eval.api.registry import register_model
  from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
  if __name__ != "__main__":
    raise
  print(f"paxlike.cli.harness: {error}: pip install 'paxlike[lm_eval]'.", file=sys.stderr)
  sys.exit(2)

from paxlike import fiddlers
from paxlike.config import building, graph_file, knob_types, ranges
from paxlike.data import token_index
from paxlike.data.corpus import Corpus
from paxlike.data.examples import ExampleRows
from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.devices import jax_setup, topology, xla_flags
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.errors import UserError, did_you_mean, one_line
from paxlike.inference.decoding import DecodingOptions
from paxlike.inference.sampling import Sampling
from paxlike.layers.decoder import Batch
from paxlike.training import decode_mode, evaluation
from paxlike.training.evaluation import EvalSet, Evaluator, Scores, Sums
from paxlike.training.execution import Execution
from paxlike.training.trainer import Trainer

# (texts, ids of the context, ids of the continuation).
Encoded = tuple[Any, list[int], list[int]]
# Argument of a model -> its type; and the arguments that the harness passes to every model.
_ARGUMENTS: dict[str, Any] = {
  "folder": ranges.Path,
  "step": ranges.NonNegative | None,
  "batch_size": ranges.Positive | Literal["auto"],
  "dtype": ranges.ComputeDtype | None,
  "fdl_allow_modules": str,
}
_OF_THE_HARNESS = ("device", "max_batch_size", "trust_remote_code")


def _log_likelihood(scores: Scores, batch: Batch) -> Sums:
  """Returns the log-likelihood of each example: the sum over its tokens, not their mean."""
  total_B = -(scores.loss_BT * batch["weights"]).sum(-1)
  return {"log_likelihood": (total_B, jnp.ones_like(total_B))}


class _Pairs(Corpus):
  """Contexts with the continuations to score."""

  def __init__(self, pairs: Sequence[Encoded], *, max_len: int):
    """Truncates pairs on the left to `max_len` + 1 tokens."""
    self._documents = [([*context, *asked])[-max_len - 1 :] for _, context, asked in pairs]
    self._asked = [min(len(asked), max_len) for _, _, asked in pairs]

  def index(self) -> TokenIndex:
    offsets = np.cumsum([0, *map(len, self._documents)], dtype=np.int64)
    weights = np.zeros(offsets[-1], np.uint8)
    for end, count in zip(offsets[1:], self._asked, strict=True):
      weights[end - count : end] = 1
    return TokenIndex(np.concatenate(self._documents), offsets, {"weights": weights})


@register_model("paxlike")
class PaxlikeLM(TemplateLM):
  """The model of a run, with the harness's interface."""

  def __init__(
    self,
    folder: str | None = None,
    step: int | str | None = None,
    batch_size: int | str = 32,
    dtype: str | None = None,
    fdl_allow_modules: str = "",
    **others: Any,
  ):
    """Loads a checkpoint.

    Args:
      folder: Folder of the run; required.
      step: Step of the checkpoint; None: the newest.
      batch_size: Examples per batch; "auto": as in training.
      dtype: The compute dtype; None: the run's.
      fdl_allow_modules: Modules outside of paxlike that the run's graph may use, separated by
        colons.
      **others: Arguments that the harness passes to every model, such as `device`; ignored.

    Raises:
      UserError: An argument is missing, unknown or wrong, there is no such run, or it has no
        tokenizer.
    """
    super().__init__()
    _check_names(others)
    # The harness has started threads by now.
    jax_setup.set_up(keep_heap=False, cache_folder=token_index.cache_folder() / "xla")
    run, number = _checked("folder", folder), _checked("step", step)
    rows, compute_dtype = _checked("batch_size", batch_size), _checked("dtype", dtype)
    graph: Any = graph_file.read(f"{run}/config.json", allow_modules=fdl_allow_modules.split(":"))
    fiddlers.decoding(graph)
    if compute_dtype is not None:
      fiddlers.precision(graph, compute_dtype)
    topology.take_gpu_memory()
    execution = Execution(compiler_options=xla_flags.options()[0])
    self._trainer: Trainer = dataclasses.replace(building.build(graph), execution=execution)
    self.batch_size: int = self._trainer.batch_size if rows == "auto" else rows
    self._params = self._trainer.load(run, step=number)
    if self._trainer.data.tokenizer is None:
      raise UserError(f"the data of {run} have no tokenizer.")
    self._tokens: Tokenizer = self._trainer.data.tokenizer
    self._tokens.check(self._trainer.model.vocab_size)

  @classmethod
  def create_from_arg_obj(
    cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
  ) -> Self:
    """Creates the model; refuses arguments that the harness's own flags set too."""
    given = {name for name, value in (additional_config or {}).items() if value is not None}
    for name in sorted(given & arg_dict.keys()):
      raise UserError(f"--model_args: give --{name}={arg_dict[name]} instead of {name}.")
    return super().create_from_arg_obj(arg_dict, additional_config)

  @property
  def max_length(self) -> int:
    """Tokens per sequence."""
    return self._trainer.data.seq_len

  @property
  def eot_token_id(self) -> int:
    eos = self._tokens.eos_id
    return 0 if eos is None else eos

  @property
  def prefix_token_id(self) -> int:
    prefix = self._tokens.prefix_id
    return self.eot_token_id if prefix is None else prefix

  @property
  def tokenizer_name(self) -> str:
    """Identifies the tokenizer in the harness's cache of answers."""
    return self._tokens.fingerprint()

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    ids = self._tokens.encode(string).tolist()
    bos = self._tokens.bos_id
    if add_special_tokens is False or bos is None or ids[:1] == [bos]:
      return ids
    return [bos, *ids]

  def _loglikelihood_tokens(
    self, requests: Sequence[Encoded], **kwargs: Any
  ) -> list[tuple[float, bool]]:
    if not requests:
      return []
    devices = self._trainer.devices
    corpus = _Pairs(requests, max_len=self.max_length)
    rows = ExampleRows(corpus=corpus, seq_len=self.max_length, shuffle=False, packed=False)
    metrics = (_log_likelihood, evaluation.acc_strict)
    placer = BatchPlacer(devices, batch_size=self.batch_size, seq_len=self.max_length)
    with jax.set_mesh(devices):
      evaluator = Evaluator(
        self._trainer.definition,
        EvalSet(dataset=rows, metrics=metrics),
        placer,
        batch_size=self.batch_size,
        compiler_options=self._trainer.execution.compiler_options,
      )
      records = evaluator.run(self._params).records
    found = [(record["log_likelihood"], record["acc_strict"] == 1.0) for record in records]
    for (texts, _, _), answer in zip(requests, found, strict=True):
      if texts is not None:
        self.cache_hook.add_partial("loglikelihood", texts, answer)
    return found

  def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
    windows: list[Encoded] = []
    owners: list[int] = []
    for number, request in enumerate(requests):
      rolling = get_rolling_token_windows(
        token_list=self.tok_encode(request.args[0]),
        prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length,
        context_len=1,
      )
      for context, asked in map(make_disjoint_window, rolling):
        windows.append((None, context, asked))
        owners.append(number)
    totals = [0.0] * len(requests)
    for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
      totals[owner] += value
    return totals

  def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for number, request in enumerate(requests):
      groups[json.dumps(request.args[1], sort_keys=True)].append(number)
    answers = [""] * len(requests)
    for how, numbers in groups.items():
      options = _options(json.loads(how), num_rows=self.batch_size)
      prompts = [self._truncated(requests[n].args[0], options.max_new_tokens) for n in numbers]
      with jax.set_mesh(self._trainer.devices):
        decoding = decode_mode.decoding_of(self._trainer, self._params, options)
        for result in decoding.run(prompts):
          answers[numbers[result.prompt]] = result.text
    for request, answer in zip(requests, answers, strict=True):
      self.cache_hook.add_partial("generate_until", request.args, answer)
    return answers

  def _truncated(self, prompt: str, max_new_tokens: int) -> str:
    """Returns a prompt truncated on the left, to leave room for the new tokens."""
    ids = self._tokens.encode(prompt)
    room = self.max_length - max_new_tokens - 1
    return prompt if len(ids) <= room else self._tokens.decode(ids[-room:])


def _check_names(others: Iterable[str]):
  """Raises a UserError if an argument of a model is neither paxlike's nor the harness's."""
  for name in others:
    if name not in _OF_THE_HARNESS:
      hint = did_you_mean(name, _ARGUMENTS) or f" There are {', '.join(_ARGUMENTS)}."
      raise UserError(f"--model_args: paxlike has no {name}.{hint}")


def _checked(name: str, value: Any) -> Any:
  """Returns an argument of a model, converted to its type."""
  if name == "folder" and value is None:
    raise UserError("--model_args needs folder=DIR, the folder of a run or of a converted model.")
  value = str(value) if name == "folder" else value  # The harness parses numbers.
  try:
    return knob_types.convert(_ARGUMENTS[name], value, text=isinstance(value, str))
  except knob_types.RefusedError as refusal:
    raise UserError(f"--model_args {name}={value}: {refusal}") from None


def _options(asked: dict[str, Any], *, num_rows: int) -> DecodingOptions:
  """Returns the decoding options for the harness's `gen_kwargs`."""
  until = asked.get("until") or []
  sampling = Sampling()
  if asked.get("do_sample", True) and asked.get("temperature"):
    given = {name: asked[name] for name in ("top_k", "top_p", "min_p") if asked.get(name)}
    sampling = Sampling(temperature=asked["temperature"], **given)
  return DecodingOptions(
    max_new_tokens=int(asked.get("max_gen_toks", 256)),
    sampling=sampling,
    stop=tuple([until] if isinstance(until, str) else until),
    num_rows=num_rows,
  )


def main() -> int:
  """Runs the harness's own program; returns the exit status, 2 for a user error."""
  from lm_eval.__main__ import cli_evaluate

  try:
    cli_evaluate()
  except ValueError as error:
    # The harness raises ValueError for invalid arguments.
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if not isinstance(error, UserError) and "lm_eval" not in raised_in.parts:
      raise
    print(f"paxlike.cli.harness: {one_line(error)}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
