# SPDX-License-Identifier: Apache-2.0
"""The knobs of all experiments and data mixins, by the class that declares them."""

import pytest

from paxlike import registry
from paxlike.config.knobs import Knob
from paxlike.experiments import datasets

EXPERIMENTS = registry.registered()
_MIXINS = [getattr(datasets, name) for name in datasets.__all__]
# Class -> name -> knob.
DECLARED: dict[type, dict[str, Knob]] = {}
for _cls in (*EXPERIMENTS.values(), *_MIXINS):
  for _name, _knob in _cls.knobs().items():
    DECLARED.setdefault(_knob.declared_in, {})[_name] = _knob

every_experiment = pytest.mark.parametrize("cls", EXPERIMENTS.values(), ids=lambda c: c.__name__)
# A mistake in a declaration fails once, and not in each experiment that inherits it.
every_declaring_class = pytest.mark.parametrize("owner", DECLARED, ids=lambda c: c.__name__)
