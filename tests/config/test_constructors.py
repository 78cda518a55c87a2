# SPDX-License-Identifier: Apache-2.0
"""Arguments that a layer takes from its base class are checked like its own."""

import fiddle as fdl
import pytest

from paxlike import layers
from paxlike.config import graph_types
from paxlike.data.tuning.prompts import Prompts
from paxlike.data.tuning.sums import SumPrompts
from paxlike.errors import UserError


def test_arguments_of_the_base_class_are_known_and_checked():
  with pytest.raises(UserError, match=r"rank='four': expected"):
    graph_types.check(fdl.Partial(layers.Dora, rank="four"))
  with pytest.raises(UserError, match=r"vocab_size=0: expected"):
    graph_types.check(fdl.Config(Prompts, vocab_size=0))
  with pytest.raises(UserError, match="lacks the required argument rank"):
    graph_types.check(fdl.Partial(layers.Dora, role="query"))


@pytest.mark.parametrize(("cls", "name"), [(layers.Dora, "others"), (SumPrompts, "max_tokens")])
def test_other_arguments_are_refused(cls, name):
  with pytest.raises(TypeError, match=name):
    fdl.Config(cls, **{name: 1})
