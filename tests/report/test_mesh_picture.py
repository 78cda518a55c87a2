# SPDX-License-Identifier: Apache-2.0
"""The mesh of a run as its configuration gives it, and its picture."""

import json
import pathlib

import pytest
from etils import epath
from helpers import reported_runs, strict_html

from paxlike.devices import mesh
from paxlike.report import mesh_picture, run_config


def drawn(**sizes: tuple[int, int]) -> strict_html.Element:
  every = {axis: sizes.get(axis, (1, 1)) for axis in mesh.AXES}
  return strict_html.parse(f"<!DOCTYPE html>\n<div>{mesh_picture.picture(every)}</div>")


def devices(picture: strict_html.Element) -> int:
  return sum(e.attributes.get("class") == "device" for e in picture.all("span"))


@pytest.mark.parametrize(
  "sizes, shown, spoken",
  [
    ({}, 1, "one device"),
    ({"data": (8, 1)}, 8, "8 devices: data 8"),
    ({"fsdp": (4, 2)}, 8, "8 devices: fsdp 2 across slices or nodes, fsdp 4"),
    ({"data": (1, 2), "fsdp": (2, 1), "tensor": (4, 1)}, 16, "16 devices"),
    ({"fsdp": (256, 1)}, 8, "256 devices: fsdp 256"),
    (dict.fromkeys(mesh.AXES, (8, 1)), None, "262,144 devices"),
  ],
)
def test_each_device_is_a_box_unless_there_are_too_many(sizes, shown, spoken):
  picture = drawn(**sizes)
  count = devices(picture)
  assert count == shown if shown is not None else 0 < count <= 256
  (image,) = [e for e in picture.all("div") if e.attributes.get("role") == "img"]
  assert spoken in (image.attributes["aria-label"] or "")
  cut = [e.words for e in picture.all("span") if e.attributes.get("class") == "more"]
  assert bool(cut) == any(size > 8 for pair in sizes.values() for size in pair) or shown is None


def with_mesh(folder: pathlib.Path, **arguments: list[int]) -> epath.Path:
  """Writes a golden run with another mesh."""
  reported_runs.write(folder)
  saved = json.loads((folder / "config.json").read_text())
  shapes = {name: {"tuple": sizes} for name, sizes in arguments.items()}
  saved["graph"]["arguments"]["mesh"]["arguments"] = shapes
  (folder / "config.json").write_text(json.dumps(saved))
  return epath.Path(folder)


@pytest.mark.parametrize(
  "shapes, num_devices, expected",
  [
    ({"ici": [-1, 1, 1]}, 8, {"data": (8, 1)}),
    ({"ici": [-1, 1, 1]}, None, {}),
    ({"ici": [2, 2, 2], "dcn": [2, 1, 1]}, 16, {"data": (2, 2), "fsdp": (2, 1), "tensor": (2, 1)}),
    ({"ici": [1, 4, 1]}, 8, {"data": (1, 2), "fsdp": (4, 1)}),  # Two TPU slices.
  ],
)
def test_mesh_is_that_of_the_graph_and_the_devices(tmp_path, shapes, num_devices, expected):
  found = run_config.read(with_mesh(tmp_path / "a", **shapes), num_devices=num_devices)
  assert {axis: pair for axis, pair in found.mesh.items() if pair != (1, 1)} == expected
  assert found.notes == ()


def test_memory_of_a_device_is_its_share(tmp_path):
  whole = run_config.read(with_mesh(tmp_path / "a", ici=[1, 1, 1]), num_devices=1).memory
  share = run_config.read(with_mesh(tmp_path / "b", ici=[1, 8, 1]), num_devices=8).memory
  for kind, one in whole.items():
    assert one.per_device == one.total == share[kind].total
    assert one.total / 8 <= share[kind].per_device < one.total / 4  # Norms are not sharded.
