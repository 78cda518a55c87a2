# SPDX-License-Identifier: Apache-2.0
"""A class with a knob of each kind, and a subclass."""

import enum
from typing import Literal

import jax.numpy as jnp

from paxlike.config import knobs
from paxlike.config.knobs import UNSET, Dtype


class Policy(enum.Enum):
  NOTHING = 1
  EVERYTHING = 2


class Base(knobs.Knobs):
  #: Transformer blocks,
  #: all alike.
  NUM_LAYERS: int = 12
  RATE: float = 1  #: The peak.
  FLAG: bool = False
  NAME: str = "base"
  DTYPE: Dtype = jnp.bfloat16
  POLICY: Policy = Policy.EVERYTHING
  SHAPE: tuple[int, ...] = (-1, 1, 1)
  WORDS: tuple[str, ...] = ()
  SIZES: dict[str, int] = {}
  NORM: Literal["rms", "layer"] = "rms"
  WIDTH: int | None = None
  PATH: str | None = None
  MESH: tuple[int, ...] | dict[str, int] = (1,)
  NEEDED: int = UNSET  #: Of each recipe.
  CHOICE: Literal[  #: Spans lines.
    "a",
    "b",
  ] = "a"


class Recipe(Base):
  NUM_LAYERS = 24
  SHAPE = [8, 1, 1]  # pyright: ignore[reportAssignmentType]
