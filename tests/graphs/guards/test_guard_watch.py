"""Every change of what a captured module reaches is seen at the next call, although a guard looks again only when a
dictionary on its way has changed; and what does not matter goes on replaying.

The reference is a copy of the module that runs eagerly. Calls come in front of each change, so that the guard has
something to rely on. Before Python 3.12 dictionaries cannot be watched: each call then looks everything up.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guarded import Config, Memory, Net, assert_refused, assert_replays, batch, double, graphed_net
from torch import nn
from twins import run

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- Changes that matter, and how they are named ----


def new_parameter(net: Net) -> nn.Parameter:
    return nn.Parameter(double(net.up.weight))


def setdefault_after_pop(net: Net) -> None:
    net.table.setdefault("bias", double(net.table.pop("bias")))


def other_members(net: Net) -> None:
    net.__dict__ = {**vars(net), "scale": double(net.scale)}


def other_members_of_a_submodule(net: Net) -> None:
    net.up.__dict__ = {**vars(net.up), "training": False}


def set_in_place(net: Net) -> None:
    with torch.no_grad():
        net.up.weight.set_(double(net.up.weight))


def deleted_and_other(net: Net) -> None:
    scale = net.scale
    del net.scale
    net.scale = double(scale)


def changed_by_another_thread(net: Net) -> None:
    thread = threading.Thread(target=lambda: setattr(net, "scale", double(net.scale)))
    thread.start()
    thread.join()


def changed_by_a_pre_hook(net: Net) -> None:
    net.register_forward_pre_hook(lambda net, args: setattr(net, "scale", double(net.scale)))


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    # attributes
    "a parameter": (lambda n: setattr(n.up, "weight", new_parameter(n)), "weight of up moved"),
    "a parameter to None": (lambda n: setattr(n.up, "bias", None), "bias of up is no longer a tensor"),
    "a buffer": (lambda n: setattr(n, "shift", double(n.shift)), "shift moved"),
    "a submodule": (lambda n: setattr(n, "act", nn.Tanh()), "act was replaced"),
    "a plain attribute": (lambda n: setattr(n, "scale", double(n.scale)), "scale moved"),
    "a plain attribute, by object": (lambda n: object.__setattr__(n, "scale", double(n.scale)), "scale moved"),
    "a plain attribute, by vars": (lambda n: vars(n).update(scale=double(n.scale)), "scale moved"),
    "a plain attribute to no tensor": (lambda n: setattr(n, "scale", 2.0), "scale is no longer a tensor"),
    "a plain attribute deleted": (lambda n: delattr(n, "scale"), "scale is gone"),
    "a plain attribute deleted and another added": (deleted_and_other, "scale moved"),
    "a plain object": (
        lambda n: setattr(n, "config", Config(n.config.gain)),
        "config was replaced",
    ),
    "inside a plain object": (lambda n: setattr(n.config, "gain", double(n.config.gain)), "config.gain moved"),
    "a dict": (lambda n: setattr(n, "table", {"bias": double(n.table["bias"])}), r"table\['bias'\] moved"),
    "a list": (lambda n: setattr(n, "constants", n.constants[:1]), r"constants\[1\] is gone"),
    "by another thread": (changed_by_another_thread, "scale moved"),
    "by a pre-hook of the call itself": (changed_by_a_pre_hook, "scale moved"),
    # dictionaries
    "_parameters[name]": (lambda n: n.up._parameters.__setitem__("weight", new_parameter(n)), "weight of up moved"),
    "_parameters.pop": (lambda n: n.up._parameters.pop("bias"), "bias of up is gone"),
    "_parameters replaced": (lambda n: vars(n.up).update(_parameters={}), "of up is gone"),
    "_buffers.update": (lambda n: n._buffers.update(shift=double(n.shift)), "shift moved"),
    "_modules[name]": (lambda n: n._modules.__setitem__("act", nn.Tanh()), "act was replaced"),
    "_modules with one more": (lambda n: n._modules.update(more=nn.Tanh()), "number of submodules of Net changed"),
    "_modules.clear": (lambda n: n._modules.clear(), "number of submodules of Net changed"),
    "dict[key]": (lambda n: n.table.__setitem__("bias", double(n.table["bias"])), r"table\['bias'\] moved"),
    "dict.update": (lambda n: n.table.update(bias=double(n.table["bias"])), r"table\['bias'\] moved"),
    "dict |=": (lambda n: n.table.__ior__({"bias": double(n.table["bias"])}), r"table\['bias'\] moved"),
    "dict.clear": (lambda n: n.table.clear(), r"table\['bias'\] is gone"),
    "dict.pop": (lambda n: n.table.pop("bias"), r"table\['bias'\] is gone"),
    "dict.popitem": (lambda n: n.table.popitem(), r"table\['bias'\] is gone"),
    "dict.setdefault after pop": (setdefault_after_pop, r"table\['bias'\] moved"),
    "__dict__": (other_members, "scale moved"),
    "__dict__ of a submodule": (other_members_of_a_submodule, "training flag of up is now False"),
    "__dict__ of a plain object": (lambda n: setattr(n.config, "__dict__", {}), "config.gain is gone"),
    # lists
    "list element": (lambda n: n.constants.__setitem__(0, double(n.constants[0])), r"constants\[0\] moved"),
    "list.append": (lambda n: n.constants.append(torch.zeros(1)), "length of constants changed"),
    "list.insert": (lambda n: n.constants.insert(0, n.constants[1]), r"constants\[0\] moved"),
    "list.reverse": (lambda n: n.constants.reverse(), r"constants\[0\] moved"),
    "list.pop": (lambda n: n.constants.pop(), r"constants\[1\] is gone"),
    "list.clear": (lambda n: n.constants.clear(), r"constants\[0\] is gone"),
    "ModuleList element": (lambda n: n.layers.__setitem__(1, nn.Tanh()), r"layers\.1 was replaced"),
    "ModuleList.append": (lambda n: n.layers.append(nn.Tanh()), "number of submodules of layers changed"),
    # tensors, while no dictionary changes
    ".data": (lambda n: setattr(n.up.weight, "data", double(n.up.weight)), "weight of up moved"),
    ".data in a list": (lambda n: setattr(n.constants[1], "data", double(n.constants[1])), r"constants\[1\] moved"),
    ".data transposed": (lambda n: setattr(n.up.weight, "data", n.up.weight.data.t()), "weight of up changed strides"),
    ".data of another shape": (lambda n: setattr(n.scale, "data", n.scale.data[:1]), "scale changed shape"),
    ".data of another dtype": (lambda n: setattr(n.scale, "data", n.scale.data.double()), "scale changed dtype"),
    "set_": (set_in_place, "weight of up moved"),
    "requires_grad_": (lambda n: n.up.bias.requires_grad_(False), "bias of up changed requires_grad"),
    "requires_grad_ of a buffer": (lambda n: n.shift.requires_grad_(), "shift changed requires_grad"),
    "to(dtype)": (lambda n: n.up.to(torch.float64), "of up changed dtype"),
    # what modules do besides
    "training flag": (lambda n: n.act.eval(), "training flag of act is now False"),
    "training flag in a ModuleList": (lambda n: n.layers[1].eval(), r"training flag of layers\.1 is now False"),
    "forward of a submodule": (lambda n: setattr(n.up, "forward", lambda x: x), "forward of up changed"),
    "forward hook": (lambda n: n.up.register_forward_hook(lambda *_: None), "forward hooks of up changed"),
    "backward pre-hook": (
        lambda n: n.layers[1].register_full_backward_pre_hook(lambda *_: None),
        r"backward pre-hooks of layers\.1 changed",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.one_of(3)
def test_a_change_is_refused_by_name_at_the_next_call_until_it_is_undone(device, change):
    net, twin = graphed_net(device)
    assert_replays(net, twin, device)
    memory = Memory(net)
    edit, words = CHANGES[change]
    edit(net)
    assert_refused(net, device, f"Net: .*{words}")
    memory.restore()
    assert_replays(net, twin, device)


@pytest.mark.parametrize("change", ["a plain attribute", "dict.update", "list element", ".data", "a submodule"])
def test_a_change_between_two_others_that_do_not_matter_is_seen(device, change):
    net, twin = graphed_net(device)
    net.unrelated = 0
    assert_replays(net, twin, device)
    edit, words = CHANGES[change]
    edit(net)
    net.unrelated = 1
    assert_refused(net, device, words)


def test_a_storage_that_was_resized_is_seen(device):
    net, twin = graphed_net(device)
    assert_replays(net, twin, device)
    net.constants[0].untyped_storage().resize_(400_000)
    assert_refused(net, device, r"Net: constants\[0\] moved")


def test_swapped_tensors_are_refused_or_seen(device):
    net, twin = graphed_net(device)
    run(net, batch(device))
    net.zero_grad()
    other = new_parameter(net)
    try:
        torch.utils.swap_tensors(net.up.weight, other)
    except RuntimeError:
        assert_replays(net, twin, device)
    else:
        assert_refused(net, device, "weight of up moved")


# ---- Changes that do not matter ----


def same_again(net: Net) -> None:
    net.up.weight, net.act, net.scale, net.shift = net.up.weight, net.act, net.scale, net.shift
    net.table["bias"] = net.table.pop("bias")


def deleted_and_added_again(net: Net) -> None:
    scale, act, gain = net.scale, net.act, net.config.gain
    del net.scale, net.act, net.config.gain
    net.scale, net.act, net.config.gain = scale, act, gain


def containers_rebuilt(net: Net) -> None:
    net.constants, net.table = list(net.constants), dict(net.table)
    net.__dict__ = dict(vars(net))
    net.up._parameters = dict(net.up._parameters)
    net.config.__dict__ = dict(vars(net.config))


def more_members(net: Net) -> None:
    net.more = net.config.more = net.up.weight.more = torch.zeros(1)


def hook_added_and_removed(net: Net) -> None:
    net.up.register_forward_hook(lambda *_: None).remove()


def there_and_back(net: Net) -> None:
    net.act.eval()
    net.act.train()
    net.up.bias.requires_grad_(False).requires_grad_(True)
    net.up.weight.data = net.up.weight.data


def other_module(net: Net) -> None:
    other = Net("cpu")
    other.scale, other.table["bias"], other.constants[0] = torch.zeros(4), None, None
    other.eval()
    del other
    gc.collect()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "step", 3),
        same_again,
        deleted_and_added_again,
        containers_rebuilt,
        more_members,
        hook_added_and_removed,
        there_and_back,
        other_module,
    ],
    ids=lambda change: change.__name__.replace("<lambda>", "unrelated attribute"),
)
def test_what_does_not_matter_goes_on_replaying(device, change):
    net, twin = graphed_net(device)
    assert_replays(net, twin, device)
    for _ in range(2):
        change(net)
        assert_replays(net, twin, device)


def test_values_may_change_in_place(device):
    net, twin = graphed_net(device)
    assert_replays(net, twin, device)
    with torch.no_grad():
        for module in (net, twin):
            module.up.weight.mul_(2)
            module.constants[1].fill_(3)
            module.table["bias"].zero_()
            module.config.gain.add_(1)
    assert_replays(net, twin, device)
