"""Guards of functions, of many callables, of dictionaries that die; and what a guard looks up and keeps alive.

The reference is eager execution. Calls come in front of each change, so that the guard has something to rely on.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from calls import replays, run_alone
from guarded import assert_refused, assert_replays, batch, double, graphed_net
from torch import Tensor, nn
from twins import eager_copy, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- Functions ----

_global_scale = torch.ones(1)


def closure_over(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    def call(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * scale

    def change(other: Tensor) -> None:
        nonlocal scale
        scale = other

    return call, change


def list_in_a_closure(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    scales = [[scale]]
    return lambda x: x * scales[0][0], lambda other: scales[0].__setitem__(0, other)


def outer_list_in_a_closure(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    scales = [[scale]]
    return lambda x: x * scales[0][0], lambda other: scales.__setitem__(0, [other])


def dict_in_a_closure(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    scales = {"a": {"b": scale}}
    return lambda x: x * scales["a"]["b"], lambda other: scales["a"].update(b=other)


def defaults(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    def call(x: Tensor, scale: Tensor = scale) -> Tensor:  # [3, 4] -> [3, 4]
        return x * scale

    return call, lambda other: setattr(call, "__defaults__", (other,))


def keyword_defaults(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    def call(x: Tensor, *, scale: Tensor = scale) -> Tensor:  # [3, 4] -> [3, 4]
        return x * scale

    return call, lambda other: call.__kwdefaults__.update(scale=other)


def global_variable(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    def change(other: Tensor) -> None:
        global _global_scale
        _global_scale = other

    change(scale)
    return lambda x: x * _global_scale, change


def arguments_of_a_partial(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    call = functools.partial(torch.mul, scale)
    return call, lambda other: call.__setstate__((torch.mul, (other,), {}, {}))


def keywords_of_a_partial(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    call = functools.partial(torch.mul, other=scale)
    return call, lambda other: call.keywords.update(other=other)


class Scaler:
    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def method(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * self.scale

    __call__ = method


def self_of_a_method(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    scaler = Scaler(scale)
    return scaler.method, lambda other: setattr(scaler, "scale", other)


def attribute_of_a_callable_object(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    scaler = Scaler(scale)
    return scaler, lambda other: setattr(scaler, "scale", other)


def parameter_of_a_module(scale: Tensor) -> tuple[Callable, Callable[[Tensor], None]]:
    module = nn.ParameterDict({"scale": nn.Parameter(scale)})
    return lambda x: x * module["scale"], lambda other: module.update({"scale": nn.Parameter(other)})


FUNCTIONS = [
    closure_over,
    list_in_a_closure,
    outer_list_in_a_closure,
    dict_in_a_closure,
    defaults,
    keyword_defaults,
    global_variable,
    arguments_of_a_partial,
    keywords_of_a_partial,
    self_of_a_method,
    attribute_of_a_callable_object,
    parameter_of_a_module,
]


@pytest.mark.parametrize("build", FUNCTIONS, ids=lambda build: build.__name__)
def test_a_change_of_what_a_function_reaches_is_refused_and_with_on_mismatch_runs_eagerly(device, build):
    for on_mismatch in ("raise", "eager"):
        scale = torch.randn(4, device=device)
        call, change = build(scale)
        graphed = make_graphed_callables(call, (batch(device),), on_mismatch=on_mismatch)
        assert_replays(graphed, lambda x, scale=scale: x * scale, device)
        other = scale * 2
        change(other)
        if on_mismatch == "raise":
            assert_refused(graphed, device, "(moved|replaced)")
        else:
            x = batch(device)
            assert_bitwise_equal(run(graphed, x), run(lambda x, other=other: x * other, x))
            assert replays(graphed) == 2


def test_variables_that_a_function_does_not_use_may_change(device):
    global _global_scale
    scale = torch.randn(4, device=device)
    call, _ = closure_over(scale)
    graphed = make_graphed_callables(call, (batch(device),))
    for step in range(3):
        _global_scale = torch.full((1,), float(step))
        call.note = step
        assert_replays(graphed, lambda x: x * scale, device)


# ---- Many callables, dead dictionaries, memory ----


def test_of_many_callables_only_the_changed_one_is_refused(device):
    nets = [nn.Linear(4, 4, device=device) for _ in range(20)]
    twins = [eager_copy(net) for net in nets]
    make_graphed_callables(tuple(nets), tuple((batch(device),) for _ in nets))
    for net, twin in zip(nets, twins, strict=True):
        assert_replays(net, twin, device, calls=1)
    nets[7].weight = nn.Parameter(double(nets[7].weight))
    nets[13]._parameters.pop("bias")
    for number, (net, twin) in enumerate(zip(nets, twins, strict=True)):
        net.zero_grad()
        if number in (7, 13):
            assert_refused(net, device, "weight moved" if number == 7 else "bias is gone")
        else:
            assert_replays(net, twin, device)


def test_a_dict_at_the_address_of_a_dead_one_is_not_taken_for_it(device):
    net, twin = graphed_net(device)
    assert_replays(net, twin, device)
    address = id(net.table)
    net.table = None
    others = []
    while not others or (id(others[-1]) != address and len(others) < 10_000):
        others.append({"bias": double(twin.table["bias"])})
    assert id(others[-1]) == address
    net.table = others[-1]
    assert_refused(net, device, r"table\['bias'\] moved")


def test_modules_that_come_and_go_at_the_same_addresses_are_not_taken_for_each_other(device):
    addresses: list[int] = []
    while len(set(addresses)) == len(addresses) < 300:
        net, twin = graphed_net(device)
        addresses.append(id(net.__dict__))
        assert_replays(net, twin, device, calls=1)
        net.act.eval()
        assert_refused(net, device, "training flag of act is now False")
        del net
    assert len(addresses) < 300, "no address came twice: the test shows nothing"


LOOKUPS: list[str] = []


class Name(str):
    """The name of an attribute; notes when it is looked up, outside the class, whose changes matter."""

    def __hash__(self) -> int:
        LOOKUPS.append(str(self))
        return str.__hash__(self)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="dictionaries cannot be watched: each call looks up everything")
def test_a_call_looks_nothing_up_unless_something_changed_that_matters(device):
    net, _ = graphed_net(device)
    net.te_graph.reset()
    name = Name("bias")
    net.table = {name: net.table["bias"]}
    net.forward = lambda x: x * net.table["bias"]
    make_graphed_callables(net, (batch(device),))
    run(net, batch(device))
    counts = []
    changes = (
        lambda: None,
        lambda: setattr(net, "said_by_no_code", 1),
        lambda: net.act.eval().train(),
        lambda: net.table.update({name: net.table.pop(name)}),
    )
    for change in changes:
        change()
        LOOKUPS.clear()
        net(batch(device))
        counts.append(len(LOOKUPS))
    assert counts[:2] == [0, 0], "no guard asks for an attribute of this name"
    assert counts[3] > 0
    # From 3.13 on the dictionary of an instance is looked at in each call, since it cannot be watched.
    assert (counts[2] > 0) == (sys.version_info < (3, 13))


def test_changes_are_seen_when_all_watchers_are_taken():
    printed = run_alone("""
        import ctypes, torch
        from torch import nn

        @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
        def ignore(*_):
            return 0

        taken = 0
        try:
            while True:
                ctypes.pythonapi.PyDict_AddWatcher(ignore)
                taken += 1
        except (AttributeError, RuntimeError):  # before Python 3.12; none left
            pass

        import te_graph

        model = nn.Linear(4, 4)
        te_graph.make_graphed_callables(model, (torch.randn(3, 4, requires_grad=True),))
        x = torch.randn(3, 4, requires_grad=True)
        for _ in range(3):
            assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
        for name in ("weight", "bias"):
            old = model._parameters[name]
            model._parameters[name] = nn.Parameter(old.detach() * 2)
            try:
                model(x)
            except RuntimeError as error:
                print(str(error).split(" since")[0])
            model._parameters[name] = old
            model(x)
        print(model.te_graph.info()["forward_replays"])
    """)
    assert printed == "Linear: weight moved to other memory\nLinear: bias moved to other memory\n5\n"


@pytest.mark.parametrize("cycle", ["attribute", "tensor hook"])
def test_a_module_that_its_own_parameter_refers_to_is_collected_after_calls(device, cycle):
    model = nn.Linear(4, 4, device=device)
    make_graphed_callables(model, (batch(device),))
    if cycle == "attribute":
        model.weight.owner = model
    else:
        model.weight.register_hook(lambda grad, model=model: grad)
    run(model, batch(device))
    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None


def test_a_replaced_tensor_is_freed_once_the_next_call_has_seen_it(device):
    net, _ = graphed_net(device)
    run(net, batch(device))
    watch = weakref.ref(net.scale)
    net.scale = double(net.scale)
    with pytest.raises(RuntimeError, match="scale moved"):
        net(batch(device))
    assert watch() is None
