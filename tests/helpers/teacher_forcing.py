# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache, held against the model's logits of the whole text."""

import functools

import jax
import numpy as np
import pytest

from helpers.tiny_model import VOCAB
from paxlike.layers.decoder import forward


def prompts(*sizes):
  random = np.random.default_rng(0)
  return [random.integers(0, VOCAB, size).astype(np.int32) for size in sizes]


def assert_teacher_forcing(definition, params, given, texts):
  """Each new token is the likeliest after those before it, and its log-probability is right."""
  padded = np.zeros((len(given), max(text.length for text in texts)), np.int32)
  for row, (prompt, text) in enumerate(zip(given, texts, strict=True)):
    padded[row, : text.length] = [*prompt, *text.tokens]
  logits = jax.jit(functools.partial(forward, definition))(params, {"inputs": padded})[0]
  log_probabilities = np.asarray(jax.nn.log_softmax(logits))
  for row, (prompt, text) in enumerate(zip(given, texts, strict=True)):
    assert text.tokens
    for index, token in enumerate(text.tokens):
      before = log_probabilities[row, len(prompt) - 1 + index]
      assert before[token] >= before.max() - 1e-4
      assert text.log_probabilities[index] == pytest.approx(before[token], abs=1e-3)
