# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
from models import SEQ_LEN, tiny

from paxlike import generate, train_state
from paxlike.data.tokenizer import CharacterTokenizer
from paxlike.layers.decoder import forward
from paxlike.mesh import MeshSpec

ALPHABET = "".join(map(chr, range(33, 33 + 96)))


def sample(temperature, **options):
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  definition = tiny()
  params = train_state.init_params(definition, mesh, seed=0)
  text = generate.sample(
    definition,
    params,
    CharacterTokenizer(ALPHABET),
    temperature=temperature,
    window=SEQ_LEN,
    **options,
  )
  return definition, params, text


def test_near_temperature_zero_each_token_is_the_likeliest_of_its_window():
  definition, params, text = sample(1e-4, prompt="abc", num_tokens=20)
  assert text.startswith("abc")
  ids = CharacterTokenizer(ALPHABET).encode(text)
  assert len(ids) == 23
  for end in range(3, 23):
    window = ids[max(0, end - SEQ_LEN) : end]
    padded = jnp.zeros((1, SEQ_LEN), jnp.int32).at[0, : len(window)].set(window)
    logits, _ = forward(definition, params, {"inputs": padded})
    assert ids[end] == logits[0, len(window) - 1].argmax()


def test_samples_depend_on_the_seed_alone():
  texts = [sample(1.0, prompt="a", num_tokens=10, seed=seed)[2] for seed in (1, 1, 2)]
  assert texts[0] == texts[1] != texts[2]
