# SPDX-License-Identifier: Apache-2.0
"""Errors of layers, which know no knobs, are shown with the knobs that set their arguments."""

import pytest

from paxlike import registry
from paxlike.config.knob_arguments import knobs_of, named
from paxlike.config.knobs import Knobs
from paxlike.errors import ArgumentError


def edit(graph, size):
  del graph, size


class Helpers:
  edit = staticmethod(edit)


class Own(Knobs):
  WIDTH: int = 8
  HEADS: int | None = None
  DEPTH: int = 6
  SPLIT: int | None = None
  REPEAT: int | None = None

  def build(self, graph):
    whole, rest = divmod(self.DEPTH, 2)
    given = {self.SPLIT, self.REPEAT} - {None}
    heads = self.HEADS
    loop = whole
    loop = loop if graph else rest
    graph.heads = 2 if heads is None else heads
    Helpers.edit(graph, self.WIDTH)
    graph.update(width=self.width(), repeats=whole, chunks=given.pop(), twice=2 * self.DEPTH)
    graph.loop = loop

  def width(self):
    return self.width() if self.HEADS else self.WIDTH


@pytest.mark.parametrize(
  ("argument", "knobs"),
  [
    ("width", ["WIDTH"]),
    ("size", ["WIDTH"]),
    ("heads", ["HEADS"]),
    ("repeats", ["DEPTH"]),
    ("chunks", ["SPLIT", "REPEAT"]),
    ("loop", ["DEPTH"]),
    ("twice", ["DEPTH"]),
    ("nothing", []),
  ],
)
def test_knobs_are_found_in_the_source(argument, knobs):
  assert knobs_of(Own, argument) == knobs


@pytest.mark.parametrize(
  ("knobs", "text", "shown"),
  [
    ({}, "width=8 is wrong.", "WIDTH=8 is wrong."),
    ({}, "width=9: wrong.", "width=9 (WIDTH=8): wrong."),
    ({}, "heads=2 (nothing=3)", "HEADS=2 (nothing=3)"),
    ({"REPEAT": 2}, "chunks=2 x twice=12.", "REPEAT=2 x twice=12 (DEPTH=6)."),
    ({}, "a.width=8 or --width=8", "a.width=8 or --width=8"),
  ],
)
def test_messages_name_knobs_and_values(knobs, text, shown):
  assert named(Own(**knobs), ArgumentError(text)) == shown


def test_the_arguments_of_our_layers_are_found():
  names = {
    "Gpt3_52k": "num_heads head_dim kernel dtype vocab_size max_len",
    "DeepSeekV3": "num_kv_heads rope_dim num_experts num_chosen num_groups num_chosen_groups",
    "PileGLaM126M64E": "num_buckets max_distance schedule stages chunks microbatches repeats",
  }
  found = [
    knobs_of(registry.find(one), name) for one, text in names.items() for name in text.split()
  ]
  assert [knobs[0] for knobs in found] == [
    *("NUM_HEADS", "DIMS_PER_HEAD", "ATTENTION_KERNEL", "FPROP_DTYPE", "VOCAB_SIZE", "MAX_SEQ_LEN"),
    *("NUM_KV_HEADS", "DIMS_PER_ROPE_HEAD", "NUM_EXPERTS", "NUM_EXPERTS_PER_TOKEN"),
    *("NUM_EXPERT_GROUPS", "NUM_EXPERT_GROUPS_PER_TOKEN", "RELATIVE_BUCKETS", "RELATIVE_DISTANCE"),
    *("PIPELINE_SCHEDULE", "NUM_STAGES", "NUM_VIRTUAL_STAGES", "NUM_STAGES", "NUM_LAYERS"),
  ]
