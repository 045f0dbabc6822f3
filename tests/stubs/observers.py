"""What looks on while torch runs: modes that note what they see, and a subclass of tensors that does nothing more."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Notes the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Lets all of torch's functions pass."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    pass


def on_device(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


class Copies(TorchDispatchMode):
    """Collects operations that take a tensor of the host and one of the device, or make one from the other."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, out))
        seen = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if seen == {"cpu", "meta"}:
            self.found.append(str(func))
        return out


class Literals(TorchFunctionMode):
    """Collects what torch copies from the host's memory although no tensor shows it: Python's numbers.

    Those are tensors made from lists, and a number assigned to one element or through an index tensor: on a GPU torch
    copies it and waits. Assigned to a slice, or by fill_, it is an argument of a kernel.
    """

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and out.device.type == "meta":
            self.found.append(func.__name__)
        number = func is torch.Tensor.__setitem__ and isinstance(args[2], int | float)
        if number and (isinstance(args[1], torch.Tensor) or args[0][args[1]].dim() == 0):
            self.found.append("assignment of a number")
        return out


def crossings(call):
    found = []
    with Copies(found), Literals(found):
        call()
    return found
