# SPDX-License-Identifier: Apache-2.0
"""What the plots of this package have in common."""

from typing import TYPE_CHECKING, Any

from paxlike.errors import UserError

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

INK, FAINT = "#333333", "#dddddd"


def empty() -> "Figure":
  """Returns an empty figure.

  Raises:
    UserError: matplotlib is not installed.
  """
  try:
    import matplotlib.figure
  except ImportError:
    raise UserError("matplotlib is missing: pip install 'paxlike[plot]'.") from None
  # A figure made without pyplot uses Agg regardless of MPLBACKEND, and needs no display.
  return matplotlib.figure.Figure(dpi=120, layout="constrained")


def colors(count: int) -> list[Any]:
  """Returns so many colours that are told apart."""
  import matplotlib

  if count <= 10:
    return list(matplotlib.color_sequences["tab10"][:count])
  return [matplotlib.colormaps["turbo"](0.05 + 0.9 * i / (count - 1)) for i in range(count)]


def frame(axes: "Axes", label: str):
  """Labels the vertical axis, and draws a grid instead of a box."""
  axes.set_ylabel(label, color=INK)
  axes.grid(color=FAINT, linewidth=0.6)
  axes.set_axisbelow(True)
  axes.tick_params(colors=INK)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
