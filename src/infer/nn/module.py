"""A leaner nn.Module.

A decode step on a CPU makes hundreds of small calls between GEMVs that stream the weights through all processor caches,
so each Python frame starts cold. nn.Module's own `__call__` and `__getattr__` are a large part of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn


def is_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


class Hooks(OrderedDict[int, Any]):
    """The hooks of a module: registering or removing one counts in `Module.changes`."""

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        Module.changes += 1

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        Module.changes += 1

    def clear(self) -> None:
        super().clear()
        Module.changes += 1


class Module(nn.Module):
    """An nn.Module whose children are plain attributes and whose call is its forward, unless it has hooks.

    Not supported: torch's global module hooks, and `torch.func.functional_call`.
    """

    changes = 0  # counts changes to attributes, hooks or weights of any module, after which plans must be checked

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(_forward_hooks=Hooks(), _forward_pre_hooks=Hooks())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.__dict__[name] = param
        Module.changes += 1

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        self.__dict__[name] = module
        Module.changes += 1

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)
        Module.changes += 1

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (bool, int, float, str)) and self.__dict__.get(name) is value:
            return  # `eval` does this for every module at each call
        if isinstance(value, nn.Module):
            self.__dict__.get("_parameters", {}).pop(name, None)  # a quantized weight replaces a parameter
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value
        Module.changes += 1

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Moving a module may replace its parameters.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.__dict__.update(self._parameters)
        Module.changes += 1
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)
