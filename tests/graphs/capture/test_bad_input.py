"""What make_graphed_callables refuses: the exception, its words, and that nothing has changed by then.

A refused call leaves behind what ``twins.snapshot`` sees of its modules, and no handle.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twins import run, snapshot

from te_graph import Recorder, make_graphed_callables
from te_graph.testing import assert_bitwise_equal


def batch(device: str, requires_grad: bool = True) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=requires_grad)


@pytest.fixture
def model(device: str) -> nn.Sequential:
    """A module with a gradient, a frozen parameter, buffers and dropout."""
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device)
    run(made, batch(device))
    made[1].weight.requires_grad_(False)
    return made


@pytest.fixture
def refuses(model: nn.Module) -> Callable[..., None]:
    """Asserts that a call raises exactly this exception with these words, and changes nothing."""

    def refuses(error: type[Exception], words: str, *args: Any, **kwargs: Any) -> None:
        before = snapshot(model)
        with pytest.raises(error, match=words) as refusal:
            make_graphed_callables(*args, **kwargs)
        assert refusal.type is error
        assert_bitwise_equal(snapshot(model), before)
        assert not hasattr(model, "te_graph")

    return refuses


@pytest.mark.parametrize(
    ("option", "value", "error", "words"),
    [
        ("num_warmup_iters", "3", TypeError, "expected num_warmup_iters to be an int, got str"),
        ("num_warmup_iters", 2.0, TypeError, "expected num_warmup_iters to be an int, got float"),
        ("num_warmup_iters", True, TypeError, "expected num_warmup_iters to be an int, got bool"),
        ("num_warmup_iters", -1, ValueError, "expected num_warmup_iters >= 0, got -1"),
        ("max_in_flight", None, TypeError, "expected max_in_flight to be an int, got NoneType"),
        ("max_in_flight", 0, ValueError, "expected max_in_flight >= 1, got 0"),
        ("allow_unused_input", 1, TypeError, "expected allow_unused_input to be a bool, got int"),
        ("accumulate_grads", None, TypeError, "expected accumulate_grads to be a bool, got NoneType"),
        ("grad_dtype", "float32", TypeError, "expected grad_dtype to be a floating point torch.dtype, got 'float32'"),
        ("grad_dtype", torch.int32, TypeError, "expected grad_dtype to be a floating point .*, got torch.int32"),
        ("capture_error_mode", "strict", ValueError, r"expected capture_error_mode in \('global', .*\), got 'strict'"),
        ("capture_error_mode", None, ValueError, r"expected capture_error_mode in \('global', .*\), got None"),
        ("chain", "yes", TypeError, "expected chain to be a bool, got str"),
        ("hooks", "keep", ValueError, r"expected hooks in \('refuse', 'captured'\), got 'keep'"),
        ("hooks", True, ValueError, r"expected hooks in \('refuse', 'captured'\), got True"),
        ("on_mismatch", "warn", ValueError, r"expected on_mismatch in \('raise', 'eager', 'capture'\), got 'warn'"),
        ("on_mismatch", ["eager"], ValueError, r"expected on_mismatch in \('raise', .*\), got \['eager'\]"),
        ("on_exhausted", "capture", ValueError, r"expected on_exhausted in \('raise', 'eager'\), got 'capture'"),
        ("on_exhausted", None, ValueError, r"expected on_exhausted in \('raise', 'eager'\), got None"),
        ("max_captures", 8.0, TypeError, "expected max_captures to be an int, got float"),
        ("max_captures", True, TypeError, "expected max_captures to be an int, got bool"),
        ("max_captures", 0, ValueError, "expected max_captures >= 1, got 0"),
        ("show_progress", 1, TypeError, "expected show_progress to be a bool or None, got int"),
        ("pool", 3, TypeError, "expected pool to be what .*graph_pool_handle.* returns .*, got int"),
        ("autograd_params", None, TypeError, "expected autograd_params to be several parameters, got NoneType"),
        ("autograd_params", "0.weight", TypeError, "expected autograd_params to be several parameters, got str"),
        ("autograd_params", torch.ones(2), TypeError, "expected autograd_params to be several parameters, got Tensor"),
    ],
)
def test_an_option_of_wrong_type_or_value_is_refused_by_name(device, model, refuses, option, value, error, words):
    refuses(error, f"make_graphed_callables: {words}", model, (batch(device),), **{option: value})


@pytest.mark.parametrize(
    ("make", "error", "got"),
    [
        (lambda model: "0.bias.", ValueError, "to be a parameter of the callables, got '0.bias.'"),
        (lambda model: "1.running_mean", ValueError, "to be a parameter of the callables, got '1.running_mean'"),
        (
            lambda model: model[1].running_mean,
            ValueError,
            r"to be a parameter of the callables, got one of shape \[4\]",
        ),
        (lambda model: nn.Parameter(torch.ones(2)), ValueError, r"to be a parameter of .*, got one of shape \[2\]"),
        (lambda model: model[0].weight * 2, TypeError, "to be a parameter or its name, got a computed tensor"),
        (lambda model: 0, TypeError, "to be a parameter or its name, got int"),
        (lambda model: [model[0].weight], TypeError, "to be a parameter or its name, got list"),
    ],
    ids=["name", "buffer's name", "buffer", "foreign", "computed", "number", "list"],
)
def test_a_parameter_for_autograd_that_is_none_of_the_callables_is_refused_by_position(
    device, model, refuses, make, error, got
):
    words = rf"make_graphed_callables: expected autograd_params\[1\] {got}"
    refuses(error, words, model, (batch(device),), autograd_params=["0.weight", make(model)])
    if isinstance(make(model), str):
        words = r"expected autograd_params\[0\] to be a parameter of the callables"
        refuses(ValueError, words, lambda x: model(x), (batch(device),), autograd_params=["0.weight"])


def test_annotations_are_refused_by_a_torch_that_has_none(device, model, refuses, monkeypatch):
    monkeypatch.setattr(torch.cuda.graph, "__init__", lambda self, cuda_graph: None)
    words = "make_graphed_callables: enable_annotations=True needs a newer torch, got"
    refuses(ValueError, words, model, (batch(device),), enable_annotations=True)


def test_a_grad_dtype_that_gradients_cannot_be_accumulated_in_is_refused_by_name(device, model, refuses):
    words = "expected grad_dtype to be torch.float32 or the parameter's own dtype, torch.float32, got torch.float64"
    refuses(ValueError, words, model, (batch(device),), grad_dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda model: 3, "int"),
        (lambda model: None, "NoneType"),
        (lambda model: [model], "list"),
        (lambda model: type(model), "type"),
    ],
    ids=["number", "None", "list", "class"],
)
def test_what_is_no_module_or_function_is_refused_by_name(device, model, refuses, wrong, got):
    kinds = f"to be an nn.Module, a function, or a tuple of them, got {got}"
    target = wrong(model)
    refuses(TypeError, f"expected callables {kinds}", target, (batch(device),))
    refuses(TypeError, rf"expected callables\[1\] {kinds}", (model, target), ((batch(device),), (batch(device),)))


def test_a_module_of_torchscript_is_refused_with_advice(device, refuses):
    words = "expected callables to be written in Python, got a ScriptModule, .*: give the module that it was made of"
    refuses(TypeError, words, torch.jit.trace(nn.ReLU(), torch.ones(1)), (batch(device),))


def test_callables_in_another_container_than_a_tuple_are_refused_with_advice(device, model, refuses):
    samples = ((batch(device),),)
    refuses(TypeError, r"or a tuple of them, got list: give a tuple\(...\) of it", [model], samples)
    refuses(TypeError, r"got generator: give a tuple\(...\) of it", (one for one in [model]), samples)
    for kind, each in ((nn.ModuleList, [model]), (nn.ModuleDict, {"one": model})):
        words = f"expected callables to have a forward, got {kind.__name__}: give a tuple of its modules"
        refuses(TypeError, words, kind(each), samples)
    refuses(TypeError, "expected callables to have a forward, got Module$", nn.Module(), samples)


def test_an_empty_tuple_of_callables_is_refused(refuses):
    refuses(ValueError, "make_graphed_callables: expected .*callable", (), ())


def test_the_same_callable_twice_is_refused(device, model, refuses):
    words = r"expected each callable once, got callables\[1\] again"
    refuses(ValueError, words, (model, model), ((batch(device),), (batch(device),)))


def test_what_is_graphed_already_is_refused_and_stays_graphed(device, model):
    make_graphed_callables(model, (batch(device),))
    function = make_graphed_callables(torch.sin, (batch(device),))
    before = snapshot(model)
    for target, name in ((model, "Sequential"), (function, "sin")):
        with pytest.raises(ValueError, match=rf"callables \({name}\) is graphed already.*\.te_graph\.reset\(\)"):
            make_graphed_callables(target, (batch(device),))
    with pytest.raises(ValueError, match=r"callables\[1\] \(Sequential\) is graphed already"):
        make_graphed_callables((torch.cos, model), ((batch(device),),) * 2)
    assert_bitwise_equal(snapshot(model)["modules"], before["modules"])
    run(model, batch(device))
    run(function, batch(device))
    assert [target.te_graph.info()["backward_replays"] for target in (model, function)] == [1, 1]


@pytest.mark.parametrize("num_warmup_iters", [1, 3])
def test_a_module_around_a_graphed_one_is_refused_by_name_or_right(device, num_warmup_iters):
    inner = nn.Linear(4, 4).to(device)
    twin = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    twin[0].load_state_dict(inner.state_dict())
    outer = nn.Sequential(inner, nn.ReLU())
    make_graphed_callables(inner, (batch(device),))
    try:
        make_graphed_callables(outer, (batch(device),), num_warmup_iters=num_warmup_iters)
    except ValueError as refusal:
        assert "graphed" in str(refusal) and "0 of callables" in str(refusal)
        assert type(outer) is nn.Sequential
        assert inner.te_graph.info()["forward_replays"] == 0
    x = batch(device)
    assert_bitwise_equal(run(outer, x), run(twin, x))
    assert_bitwise_equal([p.grad for p in outer.parameters()], [p.grad for p in twin.parameters()])


def test_sample_args_of_wrong_type_or_length_are_refused_by_name(device, model, refuses):
    x = batch(device)
    advice = r": write \(x,\) for one argument x"
    refuses(TypeError, f"expected sample_args to be a tuple, got Tensor{advice}", model, x)
    refuses(TypeError, f"expected sample_args to be a tuple, got list{advice}", model, [x])
    refuses(TypeError, rf"expected sample_args\[0\] to be a tuple, got Tensor{advice}", (model,), (x,))
    refuses(TypeError, "expected sample_args to be a tuple.* one entry per callable.*, got Tensor", (model,), x)
    refuses(ValueError, "expected sample_args for 2 callables, got 1", (model, torch.sin), ((x,),))
    refuses(ValueError, "expected sample_args for 1 callables, got 2", (model,), ((x,), (x,)))


def test_sample_kwargs_of_wrong_type_or_length_are_refused_by_name(device, model, refuses):
    samples = (batch(device),)
    refuses(TypeError, "expected sample_kwargs to be a dict, got tuple", model, samples, sample_kwargs=({},))
    words = "expected sample_kwargs to be a tuple.* one entry per callable.*, got dict"
    refuses(TypeError, words, (model,), (samples,), sample_kwargs={})
    words = r"expected sample_kwargs\[0\] to be a dict, got list"
    refuses(TypeError, words, (model,), (samples,), sample_kwargs=([],))
    words = "expected sample_kwargs for 1 callables, got 2"
    refuses(ValueError, words, (model,), (samples,), sample_kwargs=({}, {}))


@pytest.mark.parametrize(
    "leaf", [object(), np.ones(3), {object()}, nn.ReLU()], ids=["object", "array", "set", "module"]
)
def test_a_sample_that_is_neither_tensor_nor_constant_is_refused_by_name(device, model, refuses, leaf):
    words = rf"expected tensors, nested containers of tensors, or constants, got {type(leaf).__name__}"
    refuses(TypeError, rf"Sequential: sample args\[1\]: {words}", model, (batch(device), leaf))
    refuses(TypeError, rf"sample args\[0\]\['deep'\]\[0\]: {words}", model, ({"deep": [leaf]},))
    refuses(TypeError, rf"sample kwargs\['more'\]: {words}", model, (batch(device),), sample_kwargs={"more": leaf})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("to_layout", "layout"),
    [
        (lambda x: x.to_sparse(), "torch.sparse_coo"),
        (lambda x: x.to_sparse_csr(), "torch.sparse_csr"),
        (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), "torch.jagged"),
    ],
    ids=["sparse", "sparse rows", "jagged"],
)
def test_sparse_and_other_non_dense_samples_are_refused_by_name(device, model, refuses, to_layout, layout):
    sample = to_layout(batch(device, requires_grad=False))
    refuses(ValueError, rf"Sequential: expected sample args\[0\] to be dense, got layout {layout}", model, (sample,))
    words = r"callable 1 \(sin\): expected sample args\[0\] to be dense"
    refuses(ValueError, words, (model, torch.sin), ((batch(device),), (sample,)))


def test_tensors_on_several_devices_are_refused_by_name(device, model, refuses):
    words = f"expected all tensors on one device, got a sample of Sequential on meta and 0.weight of .* on {device}"
    refuses(ValueError, words, model, (torch.randn(3, 4, device="meta"),))
    samples = (batch(device), torch.randn(3, 4, device="meta"))
    refuses(ValueError, "expected all tensors on one device", torch.add, samples)
    words = "expected tensors on cpu or cuda, got a sample of sin on meta"
    refuses(ValueError, words, torch.sin, (torch.randn(3, device="meta"),))


@pytest.mark.gpu
def test_cpu_and_cuda_tensors_in_one_callable_are_refused_by_name():
    model = nn.Linear(4, 4).cuda()
    with pytest.raises(ValueError, match=r"a sample of Linear on cpu and weight of Linear on cuda:0"):
        make_graphed_callables(model, (batch("cpu"),))
    weight = torch.randn(4)
    with pytest.raises(RuntimeError):
        make_graphed_callables(lambda x: x * weight, (batch("cuda"),))
    assert type(model) is nn.Linear


def test_a_buffer_that_requires_grad_is_refused_by_name(device, model, refuses):
    model[2].register_buffer("table", torch.ones(3, device=device, requires_grad=True))
    words = "expected buffers without gradients, got buffer 2.table of callables with one"
    refuses(ValueError, words, model, (batch(device),))


@pytest.mark.parametrize(
    ("lazy", "owner"),
    [
        (lambda: nn.LazyLinear(4), "weight"),
        (lambda: nn.Sequential(nn.ReLU(), nn.LazyLinear(4)), "1.weight"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "running_mean"),
    ],
)
def test_a_module_that_is_not_initialised_is_refused_until_it_was_called(device, refuses, lazy, owner):
    module = lazy().to(device)
    words = rf"got {owner} of callables \({type(module).__name__}\), which is not initialised: call it once"
    refuses(ValueError, words, module, (batch(device),))
    module(batch(device))
    make_graphed_callables(module, (batch(device),))


def test_inference_mode_is_refused(device, model, refuses):
    sample = batch(device)
    with torch.inference_mode():
        refuses(RuntimeError, r"called under torch.inference_mode\(\); use torch.no_grad\(\)", model, (sample,))


@contextlib.contextmanager
def capturing(device: str) -> Iterator[None]:
    with torch.cuda.graph(torch.cuda.CUDAGraph()) if device == "cuda" else Recorder().capture():
        yield


def test_a_capture_inside_another_capture_is_refused(device, model):
    sample = batch(device)
    before = snapshot(model)["modules"]
    with capturing(device):
        sample.detach().mul_(2)
        with pytest.raises(RuntimeError, match="make_graphed_callables: called inside another capture"):
            make_graphed_callables(model, (sample,))
    assert_bitwise_equal(snapshot(model)["modules"], before)


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (lambda x: object(), TypeError, "expected tensors, nested containers of tensors, or constants, got object"),
        (lambda x: [x, {object()}], TypeError, "expected tensors, nested containers of tensors, or constants, got set"),
        (lambda x: x.to_sparse(), TypeError, "expected dense results, got result 0 of layout torch.sparse_coo"),
    ],
    ids=["object", "set", "sparse"],
)
def test_a_result_that_cannot_be_replayed_is_refused(device, refuses, result, error, words):
    def callable_of_mine(x: Tensor) -> Any:  # [3, 4]
        return result(x)

    refuses(error, f"callable_of_mine.*{words}", callable_of_mine, (batch(device, requires_grad=False),))


def test_sparse_gradients_are_refused_with_advice(device, refuses):
    embedding = nn.Embedding(4, 3, sparse=True).to(device)
    words = r"Embedding: the gradient of a parameter of shape \[4, 3\] is torch.sparse_coo.*sparse=False"
    refuses(TypeError, words, embedding, (torch.tensor([1], device=device),))
    assert type(embedding) is nn.Embedding


def test_samples_that_do_not_fit_the_signature_are_refused(device, model, refuses):
    refuses(TypeError, r"missing a required argument: 'input'; write sample_args=\(input,\) or", model, ())
    refuses(TypeError, "positional argument", model, (batch(device), batch(device)))
    refuses(TypeError, "unexpected keyword argument 'mask'", model, (batch(device),), sample_kwargs={"mask": None})


def two(x: Tensor, y: Tensor, how: Any = None) -> Tensor:  # [3, 4], [3, 4] -> [3, 4]
    return x * y


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        ({0: 3.0}, r"expected args\[0\] \(x\) to be a tensor as at capture, got 3\.0"),
        ({1: object()}, r"expected args\[1\] \(y\) to be a tensor as at capture, got <object"),
        ({1: np.ones((3, 4))}, r"expected args\[1\] \(y\) to be a tensor as at capture, got array"),
        ({1: [1, 2]}, r"expected args\[1\] \(y\) nested as at capture, got a list of another structure"),
        ({2: "mean"}, r"expected args\[2\] \(how\) to be 'sum' as at capture, got 'mean'"),
        ({2: torch.ones(1)}, r"expected args\[2\] \(how\) to be 'sum' as at capture, got tensor"),
        ({0: torch.ones(3, 4).to_sparse()}, r"expected args\[0\] of layout Strided, got Sparse"),
        ({0: "sum", 2: torch.ones(3, 4)}, r"expected args\[0\] \(x\) to be a tensor as at capture, got 'sum'"),
    ],
    ids=["number", "object", "array", "list", "constant", "tensor for constant", "sparse", "swapped"],
)
def test_a_call_with_an_argument_of_another_kind_is_refused_by_name(device, replace, words):
    good = [batch(device, requires_grad=False), batch(device, requires_grad=False), "sum"]
    graphed = make_graphed_callables(two, tuple(good))
    before = snapshot()
    with pytest.raises(ValueError, match=f"two: {words}"):
        graphed(*(replace.get(number, argument) for number, argument in enumerate(good)))
    assert graphed.te_graph.info()["forward_replays"] == 0
    assert_bitwise_equal(snapshot(), before)
    assert torch.equal(graphed(*good), two(*good))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_call_with_another_number_of_tensors_is_refused(device, count):
    graphed = make_graphed_callables(torch.mul, (batch(device), batch(device)))
    with pytest.raises(ValueError, match=rf"mul: expected 2 .*got {count}"):
        graphed(*(batch(device) for _ in range(count)))
    assert graphed.te_graph.info()["forward_replays"] == 0


@pytest.mark.parametrize("count", [0, 2])
def test_a_call_of_a_module_that_eager_execution_refuses_too_gets_no_advice(device, model, count):
    make_graphed_callables(model, (batch(device),))
    with pytest.raises(ValueError, match=rf"Sequential: expected 1 positional argument as at capture, got {count}$"):
        model(*(batch(device) for _ in range(count)))


def test_a_call_with_other_arguments_by_position_gets_advice_on_the_sample(device):
    graphed = make_graphed_callables(lambda x, y=1.0: x * y, (batch(device),))
    words = "expected 1 positional argument as at capture, got 2; give sample_args as the model calls it; on_mismatch="
    with pytest.raises(ValueError, match=words):
        graphed(batch(device), batch(device))


def test_advice_comes_first_where_an_argument_shows_much_of_itself(device):
    good = [batch(device, requires_grad=False), batch(device, requires_grad=False), "sum"]
    graphed = make_graphed_callables(two, tuple(good))
    advice = 'on_mismatch="eager" or "capture" lets such calls run'
    with pytest.raises(ValueError, match=rf"^two: {advice}: expected args\[2\] \(how\) to be 'sum' as at capture, got"):
        graphed(*good[:2], list(range(300)).__repr__())
    with pytest.raises(ValueError, match=rf"^two: expected args\[2\] \(how\) .*; {advice}$"):
        graphed(*good[:2], "mean")


@pytest.mark.filterwarnings("ignore:Named tensors")
def test_names_of_dimensions_are_refused_in_samples_and_told_from_their_absence(device, model, refuses):
    x = batch(device)
    refuses(ValueError, r"expected sample args\[0\] without names of dimensions", model, (x.rename("n", None),))
    make_graphed_callables(model, (x,))
    with pytest.raises(ValueError, match=r"expected args\[0\] with dimensions named \[None, None\], got \['n', None\]"):
        model(x.rename("n", None))
