# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache gives what the model says of the whole text."""

import jax
import numpy as np
import pytest
from helpers.teacher_forcing import assert_teacher_forcing, prompts
from helpers.tiny_model import SEQ_LEN, tiny

from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.inference import generate as generate_module
from paxlike.inference.generate import Generator, generate
from paxlike.inference.request import Request
from paxlike.inference.sampling import Sampling
from paxlike.training import train_state


def params_of(definition, built=None):
  built = built or MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  return train_state.init_params(definition, built, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_ragged_prompts_in_few_rows_equal_teacher_forcing(scan):
  definition = tiny(scan=scan)
  params = params_of(definition)
  given = prompts(1, 7, 3, 10, 2)
  texts = generate(definition, params, given, max_new_tokens=6, num_rows=2)
  assert [len(text.tokens) for text in texts] == [6] * 5
  assert {text.ended_by for text in texts} == {"length"}
  assert_teacher_forcing(definition, params, given, texts)


@pytest.mark.slow
@pytest.mark.parametrize("ici", [(2, 2, 2), (1, 8, 1)])
def test_many_devices_decode_what_one_decodes(ici, monkeypatch):
  monkeypatch.setattr(generate_module, "_LEAST_ROOM", 4)
  definition = tiny(scan=False)
  given = prompts(4, 7, 3, 5, 2, 6, 4, 4)
  expected = generate(definition, params_of(definition), given, max_new_tokens=9)
  built = MeshSpec(ici=ici).build()
  with jax.set_mesh(built):
    params = params_of(definition, built)
    texts = generate(definition, params, given, max_new_tokens=9, steps_per_call=2)
  assert [text.tokens for text in texts] == [text.tokens for text in expected]


@pytest.mark.slow
def test_caches_grow_and_an_end_token_ends_a_text(monkeypatch):
  monkeypatch.setattr(generate_module, "_LEAST_ROOM", 4)
  definition = tiny()
  params = params_of(definition)
  given = prompts(3, 3)
  free = generate(definition, params, given, max_new_tokens=12)
  end = free[0].tokens[5]
  first = [text.tokens.index(end) if end in text.tokens else 12 for text in free]
  assert_teacher_forcing(definition, params, given, free)
  texts = generate(definition, params, given, max_new_tokens=12, end_ids=(end,))
  for text, whole, size in zip(texts, free, first, strict=True):
    assert text.tokens == whole.tokens[:size]
    assert text.ended_by == ("stop" if size < 12 else "length")


@pytest.mark.slow
def test_samples_depend_on_the_seed_and_not_on_the_company():
  definition = tiny()
  params = params_of(definition)
  given = prompts(3, 5, 4)
  options = {"max_new_tokens": 8, "sampling": Sampling(temperature=1.0)}
  together = generate(definition, params, given, seed=3, **options)
  alone = generate(definition, params, given, seed=3, num_rows=1, **options)
  other = generate(definition, params, given, seed=4, **options)
  assert [text.tokens for text in together] == [text.tokens for text in alone]
  assert [text.tokens for text in together] != [text.tokens for text in other]


def test_a_text_that_the_caller_closes_makes_room():
  definition = tiny()
  params = params_of(definition)
  generator = Generator(definition, params, num_rows=1, max_len=SEQ_LEN, steps_per_call=2)
  requests = [Request(tokens=prompt, max_new_tokens=10) for prompt in prompts(2, 2)]
  lengths = {}
  for grown in generator.run(requests):
    for text in grown:
      if text.request == 0 and len(text.tokens) >= 3:
        text.close()
      lengths[text.request] = len(text.tokens)
  assert lengths[0] < 10
  assert lengths[1] == 10


@pytest.mark.parametrize(
  ("size", "new", "says"), [(0, 4, "empty"), (SEQ_LEN, 4, "MAX_SEQ_LEN"), (3, 0, "max_new_tokens")]
)
def test_impossible_requests_are_refused(size, new, says):
  definition = tiny()
  generator = Generator(definition, params_of(definition), num_rows=1, max_len=SEQ_LEN)
  with pytest.raises(UserError, match=says):
    list(generator.run([Request(tokens=np.zeros(size, np.int32), max_new_tokens=new)]))
