# SPDX-License-Identifier: Apache-2.0
"""Schedules: each chunk once, after what it needs; bubbles and storage as published."""

import pytest

from paxlike.layers.pipeline.schedules import Schedule

SHAPES = [
  (name, stages, chunks, microbatches)
  for name, chunks in (
    ("gpipe", 1), ("1f1b", 1), ("circular", 2), ("circular", 3), ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
  )
  for stages, microbatches in ((2, 2), (4, 8), (8, 16))
] + [("gpipe", 4, 1, 3), ("1f1b", 4, 1, 3), ("1f1b", 4, 1, 7), ("1f1b", 2, 1, 1)]  # fmt: skip
every_shape = pytest.mark.parametrize(("name", "stages", "chunks", "microbatches"), SHAPES)


def halves(schedule: Schedule):
  """Yields (tick, stage, is it backward, microbatch, chunk, slot), forward first in a tick."""
  tick = 0
  for phase in schedule.phases():
    present = [half for half in phase if half is not None]
    for row in range(len(present[0].slot)):
      for is_backward, half in enumerate(phase):
        for stage in range(schedule.stages):
          if half is not None and half.microbatch[row, stage] >= 0:
            m, c, slot = (int(values[row, stage]) for values in half)
            yield tick, stage, bool(is_backward), m, c, slot
      tick += 1


@every_shape
def test_every_chunk_follows_what_it_needs_by_one_tick(name, stages, chunks, microbatches):
  schedule = Schedule(name=name, stages=stages, chunks=chunks, microbatches=microbatches)
  at = {}
  for tick, stage, is_backward, m, c, _ in halves(schedule):
    place = c * stages + stage
    assert (is_backward, place, m) not in at
    at[is_backward, place, m] = tick
  places = stages * chunks
  assert len(at) == 2 * places * microbatches
  for m in range(microbatches):
    for place in range(1, places):
      assert at[False, place, m] == at[False, place - 1, m] + 1
      assert at[True, place - 1, m] == at[True, place, m] + 1
    assert at[True, places - 1, m] >= at[False, places - 1, m]


@every_shape
def test_slots_are_read_before_they_are_written_again(name, stages, chunks, microbatches):
  schedule = Schedule(name=name, stages=stages, chunks=chunks, microbatches=microbatches)
  held: dict[tuple[int, int], tuple[int, int]] = {}
  for _, stage, is_backward, m, c, slot in halves(schedule):
    if is_backward:
      assert held.pop((stage, slot)) == (m, c)
    else:
      assert 0 <= slot < schedule.num_slots and (stage, slot) not in held
      held[stage, slot] = (m, c)
  assert not held


# The bubble of PP 8 with 64 microbatches, and chunks stored on the first and last stage: published
# formula (S - 1) / (vM + S - 1), and a replay of stages that run freely.
@pytest.mark.parametrize(
  ("name", "chunks", "bubble", "stored"),
  [
    ("gpipe", 1, 7 / 71, (64, 64)),
    ("1f1b", 1, 7 / 71, (15, 1)),
    ("circular", 2, 7 / 135, (128, 128)),
    ("circular", 3, 7 / 199, (192, 192)),
    ("interleaved_1f1b", 2, 7 / 135, (23, 9)),
    ("interleaved_1f1b", 3, 7 / 199, (31, 17)),
  ],
)
def test_bubbles_and_storage_are_as_published(name, chunks, bubble, stored):
  schedule = Schedule(name=name, stages=8, chunks=chunks, microbatches=64)
  assert schedule.bubble == pytest.approx(bubble)
  assert (schedule.stored(0), schedule.stored(7)) == stored
