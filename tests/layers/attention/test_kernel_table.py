# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel is in the table, and the table is what knobs and fiddlers offer."""

import importlib
import inspect
import pkgutil
import typing

from paxlike import fiddlers
from paxlike.config import configurable
from paxlike.experiment import Experiment
from paxlike.layers import KERNELS, KernelName, attention
from paxlike.layers.attention.kernels import name_of


def test_every_kernel_is_in_the_table():
  modules = [
    importlib.import_module(f"{attention.__name__}.{module.name}")
    for module in pkgutil.iter_modules(attention.__path__)
  ]
  found = {
    value
    for module in modules
    for value in vars(module).values()
    if inspect.isfunction(value)
    and configurable.name_of(value)
    and [*inspect.signature(value).parameters][:3] == ["q_BTNH", "k_BSKH", "v_BSKH"]
  }
  assert found == {kernel.function for kernel in KERNELS.values()}


def test_the_names_are_those_of_the_functions_and_of_the_knob():
  names = typing.get_args(KernelName)
  assert names == tuple(KERNELS)
  for name, kernel in KERNELS.items():
    assert name_of(kernel.function) == name
    assert configurable.name_of(kernel.function) == f"paxlike.layers:{name}"
  assert Experiment.knobs()["ATTENTION_KERNEL"].type == KernelName
  assert inspect.signature(fiddlers.attention).parameters["kernel"].annotation == KernelName
