"""Classes of objects in reach, what classes hold, and the code of functions are guarded.

The reference is the same program built again and run eagerly, changed in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import replays, run_alone
from mutations import assert_equal_runs, assert_not_seen, assert_seen, batch, both, linear
from torch import Tensor, nn

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return super().forward(x) * 2


class Mixed:
    """What FSDP2 puts before the class of a module: nothing that the forward uses."""

    def unshard(self) -> None: ...


class Scaler:
    factor = 2.0

    def scale(self) -> float:
        return self.factor

    @property
    def twice(self) -> float:
        return self.scale() * 2

    @staticmethod
    def shift(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x + 1

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    def __len__(self) -> int:
        return 3


class OtherScaler(Scaler):
    def scale(self) -> float:
        return 3.0


class OtherFactor(Scaler):
    factor = 5.0


class Net(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer, self.scaler = linear(device), Scaler()

    def helper(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x + 1

    def unused(self) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        x = self.helper(self.layer(x)) * self.scaler.scale() * self.scaler.twice * getattr(self, "optional", 1)
        return self.scaler.shift(x) * len(self.scaler.name()) * len(self.scaler)


def build(device: str) -> tuple[Net, Net]:
    net = Net(device)
    return net, net


OTHER_CLASSES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "module of torch": (lambda net: setattr(net.layer, "__class__", Doubling), "forward of class Linear was replaced"),
    "object": (lambda net: setattr(net.scaler, "__class__", OtherScaler), "scale of class Scaler was replaced"),
    "object with another value": (
        lambda net: setattr(net.scaler, "__class__", OtherFactor),
        "factor of class Scaler changed from 2.0 to 5.0",
    ),
}


@pytest.mark.parametrize("case", OTHER_CLASSES)
def test_another_class_of_an_object_in_reach_is_seen(device, case):
    assert_seen(lambda: build(device), *OTHER_CLASSES[case], device)


def test_another_class_of_the_callable_itself_is_seen(device):
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return super().forward(x) * 3

    assert_seen(lambda: build(device), lambda net: setattr(net, "__class__", Other), "forward of class Net", device)


def test_classes_that_change_nothing_may_be_put_on_top(device):
    def mix(net: Net) -> None:
        for one in (net, net.layer):
            if isinstance(one, Mixed):
                continue
            one.__class__ = type(f"Mixed{one.__class__.__name__}", (Mixed, one.__class__), {})

    assert_not_seen(lambda: build(device), mix, device)


MEMBERS: dict[str, tuple[type, str, Any]] = {
    "forward of a module of torch": (nn.Linear, "forward", lambda self, x: x @ self.weight),
    "call of modules": (nn.Linear, "__call__", lambda self, x: x * 5),
    "forward of the callable": (Net, "forward", lambda self, x: self.layer(x)),
    "helper of the callable": (Net, "helper", lambda self, x: x + 7),
    "method of an object": (Scaler, "scale", lambda self: 7.0),
    "property": (Scaler, "twice", property(lambda self: 9.0)),
    "static method": (Scaler, "shift", staticmethod(lambda x: x - 1)),
    "class method": (Scaler, "name", classmethod(lambda cls: "x")),
    "length": (Scaler, "__len__", lambda self: 8),
    "what was asked for in vain": (Net, "optional", 2),
}


@contextlib.contextmanager
def member_set(kind: type, name: str, value: Any) -> Iterator[None]:
    was_there, old = name in vars(kind), vars(kind).get(name)
    setattr(kind, name, value)
    try:
        yield
    finally:
        setattr(kind, name, old) if was_there else delattr(kind, name)


@pytest.mark.parametrize("case", MEMBERS)
def test_a_member_of_a_class_that_is_replaced_is_seen(device, case):
    kind, name, value = MEMBERS[case]
    graphed, _, twin, _ = both(lambda: build(device), device, on_mismatch="eager")
    assert_equal_runs(graphed, twin, device)
    with member_set(kind, name, value):
        assert_equal_runs(graphed, twin, device)
        (reason,) = graphed.te_graph.info()["eager_calls"]
        assert f"{name} of class " in reason
    for _ in range(2):
        assert_equal_runs(graphed, twin, device)
    assert replays(graphed) == 3


def test_a_member_of_a_class_that_no_code_names_may_change(device):
    graphed, _, twin, _ = both(lambda: build(device), device)
    for value in range(3):
        with member_set(Net, "unused", value), member_set(Scaler, "calls", value):
            assert_equal_runs(graphed, twin, device)
    assert replays(graphed) == 3


class Below(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return super().forward(x) * 2

    def helper(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x + 1

    def calls(self) -> int:
        return 1

    @property
    def gain(self) -> float:
        return 2.0

    @classmethod
    def shift(cls) -> float:
        return 3.0


class Between(Below):
    """Has nothing of its own, and may get it."""


class Above(Between):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.helper(super().forward(x)) * self.gain + self.shift()

    def helper(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return super().helper(x) * 3

    def calls(self) -> int:
        return 2

    @property
    def gain(self) -> float:
        return super().gain + 1

    @classmethod
    def shift(cls) -> float:
        return super().shift() + 1


BELOW: dict[str, tuple[type, str, Any]] = {
    "forward": (Below, "forward", lambda self, x: x + 7),
    "forward of torch": (nn.Linear, "forward", lambda self, x: x + 7),
    "method": (Below, "helper", lambda self, x: x + 7),
    "method of a class between": (Between, "helper", lambda self, x: x + 7),
    "property": (Below, "gain", property(lambda self: 7.0)),
    "class method": (Below, "shift", classmethod(lambda cls: 7.0)),
}


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("case", BELOW)
def test_a_member_that_code_gets_to_by_super_is_seen(device, case, is_inner):
    def make() -> tuple[nn.Module, nn.Module]:
        above = Above(4, 4, device=device)
        return (nn.Sequential(above) if is_inner else above), above

    kind, name, value = BELOW[case]
    graphed, _, twin, _ = both(make, device, on_mismatch="eager")
    with member_set(Below, "calls", lambda self: 7):  # which is never called
        assert_equal_runs(graphed, twin, device)
    with member_set(kind, name, value):
        assert_equal_runs(graphed, twin, device)
        (reason,) = graphed.te_graph.info()["eager_calls"]
        assert f"{name} of class {kind.__name__} was replaced" in reason
    assert_equal_runs(graphed, twin, device)
    assert replays(graphed) == 2


@pytest.mark.parametrize("how", ["class", "bases"])
def test_a_class_that_gets_between_two_others_is_not_seen(device, how):
    """What docs/limits.md says that is not seen. It is wrong, and known to be."""

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return super().forward(x)

    class Second(First):
        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return super().forward(x) * 2

    class Inserted(First):
        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return super().forward(x) + 1

    layer = Second(4, 4, device=device)
    graphed, x = make_graphed_callables(nn.Sequential(layer), (batch(device),)), batch(device)
    before = graphed(x).detach().clone()
    if how == "class":
        layer.__class__ = type("Third", (Second, Inserted), {})
    else:
        Second.__bases__ = (Inserted,)
    assert not torch.equal(layer(x), before)
    assert torch.equal(graphed(x), before)


def test_a_function_of_autograd_that_is_replaced_is_seen(device):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return grad * 2

    def both_ways() -> tuple[Callable, None]:
        return lambda x: Twice.apply(x), None

    graphed, _, twin, _ = both(both_ways, device, on_mismatch="eager")
    assert_equal_runs(graphed, twin, device)
    with member_set(Twice, "backward", staticmethod(lambda ctx, grad: grad * 3)):
        assert_equal_runs(graphed, twin, device)
    assert "backward of class Twice was replaced" in next(iter(graphed.te_graph.info()["eager_calls"]))


def tripled(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
    return x * 3


@pytest.mark.parametrize("which", ["callable", "inner"])
def test_other_code_of_a_function_is_seen(device, which):
    """As a reload of its module in a notebook gives to functions that are held elsewhere."""

    def make() -> tuple[Callable, Callable]:
        def inner(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return x * 2

        def outer(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return inner(x)

        return (outer, inner) if which == "inner" else (inner, inner)

    def change(function: Callable) -> None:
        function.__code__ = tripled.__code__

    assert_seen(make, change, "code of inner was replaced", device)


def test_a_method_that_is_given_other_code_is_seen(device):
    graphed, _, twin, _ = both(lambda: build(device), device, on_mismatch="eager")
    assert_equal_runs(graphed, twin, device)
    old = Net.helper.__code__
    Net.helper.__code__ = (lambda self, x: x + 7).__code__
    try:
        assert_equal_runs(graphed, twin, device)
    finally:
        Net.helper.__code__ = old
    assert "code of helper was replaced" in next(iter(graphed.te_graph.info()["eager_calls"]))
    assert_equal_runs(graphed, twin, device)
    assert replays(graphed) == 2


def test_another_graph_of_a_graph_module_is_seen(device):
    def make() -> tuple[nn.Module, torch.fx.GraphModule]:
        module = torch.fx.symbolic_trace(nn.Sequential(linear(device), nn.ReLU()))
        return nn.Sequential(module), module

    def double(module: torch.fx.GraphModule) -> None:
        (output,) = [node for node in module.graph.nodes if node.op == "output"]
        with module.graph.inserting_before(output):
            output.args = (module.graph.call_function(torch.mul, (output.args[0], 2)),)
        module.recompile()

    assert_seen(make, double, "_code of 0", device)
    assert_not_seen(make, lambda module: module.recompile(), device)


class Shared:
    def __init__(self) -> None:
        self.scale = 2.0


class Factor:
    """A descriptor."""

    def __init__(self) -> None:
        self.value = 2.0

    def __get__(self, owner: Any, kind: type) -> float:
        return self.value


class HoldsInClass(nn.Module):
    shared, table, unread, factor = Shared(), {"a": [2.0]}, Shared(), Factor()

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * self.shared.scale * self.table["a"][0] * self.factor


@pytest.mark.parametrize(
    ("change", "restore"),
    [
        (lambda: setattr(HoldsInClass.shared, "scale", 3.0), lambda: setattr(HoldsInClass.shared, "scale", 2.0)),
        (lambda: HoldsInClass.table["a"].append(3.0), lambda: HoldsInClass.table["a"].pop()),
        (lambda: HoldsInClass.table.update(a=[5.0]), lambda: HoldsInClass.table.update(a=[2.0])),
        (
            lambda: setattr(vars(HoldsInClass)["factor"], "value", 3.0),
            lambda: setattr(vars(HoldsInClass)["factor"], "value", 2.0),
        ),
    ],
    ids=["object", "list that grows", "dictionary", "descriptor"],
)
def test_what_objects_of_a_class_hold_is_seen(device, change, restore):
    def make() -> tuple[nn.Module, None]:
        return HoldsInClass(), None

    graphed, _, twin, _ = both(make, device, on_mismatch="eager")
    assert_equal_runs(graphed, twin, device)
    HoldsInClass.unread.scale += 1
    assert_equal_runs(graphed, twin, device)
    change()
    try:
        assert_equal_runs(graphed, twin, device)
        assert replays(graphed) == 2
    finally:
        restore()
    assert_equal_runs(graphed, twin, device)
    assert replays(graphed) == 3


@pytest.mark.parametrize("base", ["Tensor", "Mine"])
def test_the_first_capture_of_a_process_is_of_a_module_that_names_a_class_of_tensors(base: str) -> None:
    """What te_graph then exchanges in torch.Tensor (exports.py) is no change to the module."""
    program = f"""
        import torch
        import te_graph as tg
        from torch import Tensor

        class Mine(Tensor):
            pass

        class Net(torch.nn.Linear):
            def forward(self, x):
                x.numpy
                return super().forward(x if isinstance(x, {base}) else x * 2)

        x = torch.randn(2, 3, requires_grad=True)
        net = tg.make_graphed_callables(Net(3, 3), (x,))
        for _ in range(2):
            net(x).sum().backward()
        print(net.te_graph.info()["forward_replays"])
    """
    assert run_alone(program).split() == ["2"]
