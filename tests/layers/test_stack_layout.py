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


@pytest.mark.parametrize(("repeats", "stages", "chunks"), [(126, 8, 1), (5, 2, 2), (7, 2, 3)])
def test_the_first_virtual_stages_have_a_repeat_more_where_they_do_not_divide(
  repeats, stages, chunks
):
  layout = Layout(scanned=True, repeats=repeats).in_pipeline(stages=stages, chunks=chunks)
  size, places = layout.chunk_size, stages * chunks
  assert layout.stacked_size == len(layout.order) == size * places
  # By virtual stage instead of by stage, the repeats are in order.
  by_place = [
    layout.order[(stage * chunks + chunk) * size :][:size]
    for chunk in range(chunks)
    for stage in range(stages)
  ]
  assert [r for held in by_place for r in held if r is not None] == list(range(repeats))
  counts = [size - held.count(None) for held in by_place]
  assert sorted(counts, reverse=True) == counts and counts[0] - counts[-1] == 1
  location = layout.locate("params.stack.pattern.0.mlp.up.w")
  assert location is not None and location.layers == tuple(sorted(location.layers, key=_of(layout)))
  for index, layer in zip(location.indexes, location.layers, strict=True):
    assert layout.place(location.template, layer) == ("params.stack.pattern.0.mlp.up.w", index)


def _of(layout: Layout):
  return lambda layer: layout.order.index(layer)
