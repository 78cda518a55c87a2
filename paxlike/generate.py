# SPDX-License-Identifier: Apache-2.0
"""Sampling text from a model, in the plainest form: a pass over the whole window for each token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.layers.decoder import forward
from paxlike.layers.module import Definition, Params


def sample(
  definition: Definition,
  params: Params,
  tokenizer: Any,
  *,
  prompt: str,
  num_tokens: int,
  window: int,
  temperature: float = 0.8,
  seed: int = 0,
) -> str:
  """Returns `prompt` continued by up to `num_tokens` tokens; ends early at the tokenizer's EOS.

  Args:
    definition: The model.
    params: Its weights.
    tokenizer: A `data.tokenizer.Tokenizer`.
    prompt: Text to continue.
    num_tokens: At most so many new tokens.
    window: The tokens that the model sees: earlier ones are forgotten.
    temperature: Divides the logits; towards 0 the likeliest token is taken.
    seed: Of the draws.
  """
  prepared = jax.jit(definition.prepare)(params)

  @jax.jit
  def next_token(prepared: Params, tokens_1T: jax.Array, last: jax.Array, key: jax.Array):
    logits_1TV, _ = forward(definition, prepared, {"inputs": tokens_1T})
    return jax.random.categorical(key, logits_1TV[0, last].astype(jnp.float32) / temperature)

  prefix = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  tokens = [*prefix, *map(int, tokenizer.encode(prompt))]
  root = jax.random.key(seed)
  for index in range(num_tokens):
    recent = tokens[-window:]
    padded = np.zeros((1, window), np.int32)
    padded[0, : len(recent)] = recent
    key = jax.random.fold_in(root, index)
    token = next_token(prepared, padded, jnp.int32(len(recent) - 1), key)
    if int(token) == tokenizer.eos_id:
      break
    tokens.append(int(token))
  return tokenizer.decode(np.array(tokens[len(prefix) :], np.int32))
