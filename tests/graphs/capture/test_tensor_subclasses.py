"""Subclasses of tensors whose operations do more: as sample, as argument, as result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import replays
from torch import Tensor, nn
from twins import eager_copy, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal


class Counted(Tensor):
    """Counts the operations that it takes part in."""

    operations = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        Counted.operations += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Image(Tensor):
    """Results are images again, as of torchvision's ``tv_tensors``."""


class Weight(nn.Parameter):
    """Operations take no notice of it."""


def batch(device: str, requires_grad: bool = False) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=requires_grad)


def graphed_linear(device: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(4, 4, device=device))
    twin = eager_copy(model)
    return make_graphed_callables(model, (batch(device),), **options), twin


@pytest.mark.parametrize("kind", [Counted, Image])
def test_a_subclass_is_refused_where_the_sample_was_a_tensor(device, kind):
    model, twin = graphed_linear(device)
    with pytest.raises(
        ValueError, match=rf"Sequential: expected args\[0\] to be a torch.Tensor, got a {kind.__name__}"
    ):
        model(batch(device).as_subclass(kind))
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert replays(model) == 1


@pytest.mark.parametrize("on_mismatch", ["eager", "capture"])
@pytest.mark.parametrize("kind", [Counted, Image])
def test_a_subclass_sees_its_operations_in_an_eager_call(device, kind, on_mismatch):
    model, twin = graphed_linear(device, on_mismatch=on_mismatch)
    x = batch(device).as_subclass(kind)
    before = Counted.operations
    result = model(x)
    operations = Counted.operations - before
    expected = twin(x)
    assert type(result) is type(expected) is kind
    assert torch.equal(result.as_subclass(Tensor), expected.as_subclass(Tensor))
    assert (operations > 0) is (kind is Counted)
    assert replays(model) == 0


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_subclass_in_a_nest_is_refused(device, as_keyword):
    graphed = make_graphed_callables(
        lambda x, more: x + more[0], (batch(device),), sample_kwargs={"more": [batch(device)]}
    )
    image = batch(device).as_subclass(Image)
    args, more = (batch(device), [image]) if as_keyword else (image, [batch(device)])
    with pytest.raises(ValueError, match=r"to be a torch\.Tensor, got a Image"):
        graphed(*(args if isinstance(args, tuple) else (args,)), more=more)


def test_a_sample_of_a_subclass_is_refused(device):
    with pytest.raises(TypeError, match=r"expected sample args\[0\] to be a torch.Tensor, got a Image"):
        make_graphed_callables(nn.Linear(4, 4, device=device), (batch(device).as_subclass(Image),))


def test_a_result_of_a_subclass_is_refused(device):
    with pytest.raises(TypeError, match=r"expected result 0 to be a torch\.Tensor, got a Image"):
        make_graphed_callables(lambda x: (x * 2).as_subclass(Image), (batch(device),))


@pytest.mark.parametrize("kind", [nn.Parameter, Weight])
def test_a_parameter_may_take_the_place_of_a_tensor_and_the_reverse(device, kind):
    model = nn.Sequential(nn.Linear(4, 4, device=device))
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device, True),))
    for given in (kind(batch(device)), batch(device, True)):
        result = model(given)
        assert torch.equal(result, twin(given))
        result.sum().backward()
    assert replays(model) == 2


def original(function: Any) -> Any:
    """What torch had before the first capture, whichever test made that."""
    return getattr(function, "__wrapped__", function) if type(function).__module__.startswith("te_graph") else function


TABLE = {original(Tensor.numpy): lambda t: "numpy", original(Tensor.__dlpack__): lambda t: "dlpack"}


class Tabled(Tensor):
    """Looks functions of torch up in a table, as many libraries do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        own = TABLE.get(func)
        return super().__torch_function__(func, types, args, kwargs or {}) if own is None else own(*args)


def test_a_table_of_functions_made_before_the_first_capture_goes_on(device: str) -> None:
    graphed_linear(device)
    tabled = torch.ones(2, device=device).as_subclass(Tabled)
    assert (tabled.numpy(), tabled.__dlpack__()) == ("numpy", "dlpack")
    later = {Tensor.numpy: 1, Tensor.__dlpack__: 2}
    assert [later[one] for one in TABLE] == [1, 2]
    assert torch.overrides.resolve_name(Tensor.numpy) == "torch.Tensor.numpy"
