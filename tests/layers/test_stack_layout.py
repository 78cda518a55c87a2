# SPDX-License-Identifier: Apache-2.0
import pytest

from paxlike.layers.stack_layout import Layout

SHAPE = {"prologue": 1, "pattern": 2, "repeats": 3, "epilogue": 1}


@pytest.mark.parametrize("scanned", [False, True])
def test_locate_inverts_place(scanned):
  layout = Layout(scanned=scanned, **SHAPE)
  names = set()
  for layer in range(8):
    name, repeat = layout.place("params.stack.{}.mlp.up.w", layer)
    location = layout.locate(name)
    assert location is not None
    assert location.template == "params.stack.{}.mlp.up.w"
    assert location.layers[repeat or 0] == layer
    assert location.stacked == (repeat is not None)
    assert location.section == name.split(".")[2]
    names.add((name, repeat))
  assert len(names) == 8


def test_names_outside_a_stack_have_no_location():
  layout = Layout(scanned=True, **SHAPE)
  assert layout.locate("params.embedding.table") is None
  assert layout.locate("params.haystack.layers.3.w") is None
