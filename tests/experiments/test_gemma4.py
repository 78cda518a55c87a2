# SPDX-License-Identifier: Apache-2.0
"""Layers of Gemma 4 that read arrays of earlier layers."""

import functools

import fiddle as fdl
import jax
import numpy as np
import pytest
from helpers.shrunk import shrunk

from paxlike import fiddlers, layers
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import ArgumentError, UserError
from paxlike.experiments.gemma4 import Gemma4_31B, Gemma4_E2B
from paxlike.layers.decoder import forward
from paxlike.training import train_state


def kinds(num_layers: int) -> str:
  """L or G for each layer, local or global, lower case without keys of its own."""
  stack = Gemma4_E2B(NUM_LAYERS=num_layers, GLOBAL_EVERY=3, NUM_KV_LAYERS=4).stack()
  blocks = [*stack.prologue, *stack.pattern * stack.repeats, *stack.epilogue]
  letters = ["G" if block.attention.window is None else "L" for block in blocks]
  sizes = {letter: block.mlp.hidden_dim for letter, block in zip(letters, blocks, strict=True)}
  assert set(sizes.values()) <= {6144, 2 * 6144}
  return "".join(
    letter.lower() if block.attention.key is None else letter
    for letter, block in zip(letters, blocks, strict=True)
  )


@pytest.mark.parametrize(
  ("num_layers", "expected"),
  [
    (3, "LLG"),
    (4, "LLGG"),
    (6, "LLGLlg"),
    (7, "LLGLlgg"),
    (8, "LLGLlglg"),
    (10, "LLGLlgllgg"),
    (12, "LLGLlgllgllg"),
  ],
)
def test_the_last_layer_is_global_and_the_first_ones_have_keys(num_layers, expected):
  assert kinds(num_layers) == expected


def test_a_later_layer_needs_keys_of_its_kind():
  with pytest.raises(UserError, match=r"^NUM_KV_LAYERS=2: none of these layers has full_attention"):
    Gemma4_E2B(NUM_KV_LAYERS=2).stack()


def test_stages_do_not_pass_keys_on():
  pipeline = fdl.Config(layers.Pipeline, schedule="1f1b", stages=2, chunks=1, microbatches=2)
  with pytest.raises(ArgumentError, match=r"^stages=2: layers of this model read keys and values"):
    shrunk("Gemma4_E2B", pipeline=pipeline)


def test_layers_for_multi_token_prediction_have_keys_of_their_own():
  graph = Gemma4_E2B(MTP_NUM_LAYERS=1).trainer()
  block = graph.model.mtp.block
  assert fdl.get_callable(block.attention) is layers.Attention
  assert block.attention.key is not None and block.per_layer_input is None
  (source, *_) = fiddlers.select(graph.model.stack.prologue[-1], layers.KvSource)
  assert fdl.get_callable(source) is layers.KvSource


def test_keys_that_published_files_have_of_layers_without_are_ignored_only_there():
  name = "model.layers.20.self_attn.k_proj.weight"
  for cls, is_ignored in ((Gemma4_E2B, True), (Gemma4_31B, False)):
    values = {knob: setting.value for knob, setting in cls().values().items()}
    assert cls.hugging_face().is_ignored(name, values) is is_ignored


@pytest.mark.slow
def test_documents_of_a_packed_sequence_do_not_see_each_other():
  """In layers of every kind: with keys of their own and without, local and global."""
  definition = shrunk("Gemma4_E2B", repeats=1)
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(definition, mesh, seed=0)
  tokens = np.random.default_rng(0).integers(3, 96, (1, 32)).astype(np.int32)
  sizes = (12, 20)
  segments, positions = (
    np.concatenate(x)[None].astype(np.int32)
    for x in (
      [np.full(size, number) for number, size in enumerate(sizes, 1)],
      [np.arange(size) for size in sizes],
    )
  )
  packed = {"inputs": tokens, "segments": segments, "positions": positions}
  run = jax.jit(functools.partial(forward, definition))
  together = run(params, packed)[0]
  for start, size in zip((0, 12), sizes, strict=True):
    alone = run(params, {"inputs": tokens[:, start : start + size]})[0]
    np.testing.assert_allclose(together[:, start : start + size], alone, atol=1e-5)
