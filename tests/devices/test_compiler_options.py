# SPDX-License-Identifier: Apache-2.0
"""The options of XLA that a trainer has reach every program that it compiles for its devices."""

import pathlib
import types
from typing import Any, cast

import jax
import pytest
from helpers.characters import Tokenizer
from helpers.rows import Rows
from helpers.tiny_model import SEQ_LEN, tiny

from paxlike.devices import program_cache
from paxlike.devices.mesh import MeshSpec
from paxlike.inference import decoding
from paxlike.layers.decoder import Decoder
from paxlike.training import decode_mode, train_state
from paxlike.training.evaluation import EvalSet
from paxlike.training.execution import Execution
from paxlike.training.trainer import Trainer


@pytest.fixture
def no_cache():
  """What is in the cache is not compiled."""
  with program_cache.usable(jax.devices()[0], to_save=True):
    yield


@pytest.fixture
def trainer(tmp_path) -> Trainer:
  data: Any = types.SimpleNamespace(seq_len=SEQ_LEN, tokenizer=Tokenizer())
  unused: dict[str, Any] = dict.fromkeys(("optimizer", "keep"))
  counts = ("num_steps", "seed", "summary_every", "eval_every", "save_every")
  dump = {"xla_dump_to": str(tmp_path / "dump"), "xla_dump_hlo_as_text": True}
  return Trainer(
    **unused,
    **dict.fromkeys(counts, 1),
    model=cast("Decoder", tiny().module),
    mesh=MeshSpec(ici=(1, 1, 1)),
    train_data=data,
    eval_data={"rows": EvalSet(dataset=Rows())},
    percore_batch_size=8,
    accumulation_steps=1,
    max_skipped_in_a_row=1,
    execution=Execution(compiler_options=dump),
  )


def dumped(folder: pathlib.Path) -> set[str]:
  """Returns the names of the programs that were compiled with the options."""
  return {path.name.split(".")[1] for path in folder.glob("*after_optimizations.txt")}


@pytest.mark.usefixtures("no_cache")
def test_evaluation_and_decoding_are_compiled_with_them(trainer, tmp_path, monkeypatch):
  monkeypatch.setattr(Trainer, "devices", MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1]))
  with jax.set_mesh(trainer.devices):
    params = train_state.init_params(trainer.definition, trainer.devices, seed=1)
    for evaluator in trainer.evaluators.values():
      evaluator.run(params)
    assert dumped(tmp_path / "dump") == {"jit_measure"}
    options = decoding.DecodingOptions(max_new_tokens=SEQ_LEN - 4)
    list(decode_mode.decoding_of(trainer, params, options).run(["ab"]))
  programs = {"jit_measure", "jit_prepare", "jit__empty", "jit__prefill", "jit__decode"}
  assert dumped(tmp_path / "dump") == programs
