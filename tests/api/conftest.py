# SPDX-License-Identifier: Apache-2.0
"""A small LLaMA of bytes, and a run of it."""

import pathlib
from typing import Any

import pytest

import paxlike
from paxlike.experiments.llama import Llama


class TinyText(paxlike.datasets.LocalText, Llama):
  """So small that nothing but compilation takes time."""

  VOCAB_SIZE = 257
  NUM_LAYERS = 2
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  NUM_HEADS = 2
  MAX_SEQ_LEN = 16
  PERCORE_BATCH_SIZE = 1
  FPROP_DTYPE = "float32"
  LEARNING_RATE = 1e-2
  LR_COS_WARMUP = 2
  MAX_STEPS = 4
  SUMMARY_INTERVAL_STEPS = 1
  EVAL_INTERVAL_STEPS = 2
  CHECKPOINT_EVERY_N_STEPS = 2


@pytest.fixture(scope="session")
def tiny() -> type[TinyText]:
  """The experiment."""
  return TinyText


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, text: pathlib.Path) -> paxlike.Run:
  """A run of it."""
  return paxlike.train(TinyText, tmp_path_factory.mktemp("api") / "run", DATA_PATH=str(text))


@pytest.fixture(scope="session")
def model(trained: paxlike.Run) -> Any:
  """The model of that run."""
  return trained.load()
