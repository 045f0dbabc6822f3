"""Ways in which a projection of a layer becomes more than the product with the weight that it was made with."""

import torch


class Adapter(torch.nn.Module):
    """What a projection gives and a product of its own."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, torch.nn.Linear(base.in_features, base.out_features).requires_grad_(False)
        self.more.load_state_dict({"weight": base.weight + 1, "bias": torch.ones(base.out_features)})

    def forward(self, x):
        return self.base(x) + self.more(x)


def adapted(layer, name):
    setattr(layer, name, Adapter(getattr(layer, name)))


def hooked(layer, name):
    getattr(layer, name).register_forward_hook(lambda module, args, out: out + 1)


def hooked_before(layer, name):
    getattr(layer, name).register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def with_another_forward(layer, name):
    projection = getattr(layer, name)
    projection.forward = lambda x: torch.nn.functional.linear(x + 1, projection.weight)


def with_another_bias(layer, name):
    getattr(layer, name).bias = torch.nn.Parameter(torch.ones(getattr(layer, name).out_features), requires_grad=False)
