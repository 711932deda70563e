"""A plain call of a graphed module replays without Python, and any other arguments are treated as on the ordinary way.

The reference is a copy of the module that runs eagerly; for calls that are refused, ``torch.nn.Module.__call__`` on the
graphed module itself. Whether a call took the long way is seen by counting calls of ``Handle.call``.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from calls import batch, counted_calls, graphed_and_twin, graphed_linear, outcome, replays, run_alone
from torch import Tensor, nn
from twins import eager_copy, gradients_of, leaf_copy, mlp, run, sample, train

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
slow = pytest.fixture(counted_calls)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # [3, 7], [3, 5] -> [3, 5]
        return (x @ self.weight) * y + y


# ---- Plain calls ----


def test_plain_calls_replay_without_python_and_train_as_eager_execution(device, slow):
    model, twin = graphed_and_twin(device)
    steps = [[(batch(device),) for _ in range(2)] for _ in range(3)]
    assert_bitwise_equal(train(model, steps), train(twin, steps))
    assert slow.taken() == 0
    info = model.te_graph.info()
    assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (6, 6, {})


def test_several_tensors_by_position_replay_without_python(device, slow):
    model = Mixer().to(device)
    twin = eager_copy(model)
    shapes = [(3, 7), (3, 5)]
    make_graphed_callables(model, tuple(torch.randn(*shape, device=device, requires_grad=True) for shape in shapes))
    for _ in range(2):
        x, y = (torch.randn(*shape, device=device, requires_grad=True) for shape in shapes)
        assert_bitwise_equal(run(model, x, y), run(twin, x, y))
    assert (slow.taken(), replays(model)) == (0, 2)


def test_the_method_may_be_called_in_each_way_that_python_has(device, slow):
    model, twin = graphed_and_twin(device)
    x = batch(device)
    expected = run(twin, x)
    for call in (model.__call__, lambda *args: type(model).__call__(model, *args), lambda *args: model(*args)):
        assert_bitwise_equal(run(call, x), expected)
    assert slow.taken() == 0
    assert_bitwise_equal(run(lambda x: nn.Module.__call__(model, x), x), expected)
    assert_bitwise_equal(run(model.forward, x), expected)
    assert (slow.taken(), replays(model)) == (2, 5)


def test_capture_without_gradients_replays_without_python_where_they_are_off(device, slow):
    model = mlp(device)
    twin = eager_copy(model)
    with torch.no_grad():
        make_graphed_callables(model, (sample(device),))
        for _ in range(2):
            x = sample(device)
            assert_bitwise_equal(model(x), twin(x))
    with torch.inference_mode():
        x = sample(device)
        assert torch.equal(model(x), twin(x))
    assert (slow.taken(), replays(model)) == (0, 3)
    x = sample(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert (slow.taken(), replays(model)) == (1, 3)


def test_layers_inside_a_plain_model_replay_without_python(device, slow):
    model = nn.Sequential(mlp(device), nn.Linear(5, 7, device=device), mlp(device))
    twin = eager_copy(model)
    make_graphed_callables((model[0], model[2]), ((batch(device),), (batch(device),)))
    steps = [[(batch(device),) for _ in range(2)] for _ in range(2)]
    assert_bitwise_equal(train(model, steps), train(twin, steps))
    assert (slow.taken(), replays(model[0]), replays(model[2])) == (0, 4, 4)


def test_results_that_are_no_single_tensor_are_nested_as_before(device, slow):
    class Split(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # [3, 7] -> [3, 2], [3, 3]
            return dict(zip("ab", super().forward(x).split((2, 3), -1), strict=True))

    model = Split(7, 5).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert (slow.taken(), replays(model)) == (1, 1)


def test_calls_leave_reference_counts_as_they_were(device):
    model, _ = graphed_and_twin(device)
    x = batch(device)
    run(model, x)

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(obj) for obj in (model, x, model.te_graph, type(model), nn.Module.__call__, None)][:5]

    for call in (lambda: run(model, x), lambda: outcome(lambda: model(3)), lambda: outcome(lambda: model(x, x))):
        call()
        before = counts()
        for _ in range(20):
            call()
        assert counts() == before


def test_results_die_with_their_last_reference(device):
    model, _ = graphed_and_twin(device)
    result = model(batch(device))
    watch = weakref.ref(result)
    del result
    assert watch() is None
    assert model.te_graph.info()["in_flight"] == 0


# ---- Arguments ----


def test_keyword_arguments_of_the_capture_replay_and_others_are_refused_as_on_the_ordinary_way(device, slow):
    model = Mixer().to(device)
    twin = eager_copy(model)
    x, y = torch.randn(3, 7, device=device, requires_grad=True), torch.randn(3, 5, device=device, requires_grad=True)
    make_graphed_callables(model, (x,), sample_kwargs={"y": y})
    assert_bitwise_equal(run(model, x, y=y), run(twin, x, y=y))
    assert (slow.taken(), replays(model)) == (1, 1)
    for kwargs in ({}, {"z": y}, {"y": y, "z": y}):
        with pytest.raises(ValueError, match="keyword argument"):
            model(x, **kwargs)


ANOMALIES = {
    "nothing": lambda x: (),
    "one too many": lambda x: (x, x),
    "a number": lambda x: (3.0,),
    "None": lambda x: (None,),
    "text": lambda x: ("x",),
    "a list": lambda x: ([x],),
    "another shape": lambda x: (x[:2],),
    "another dtype": lambda x: (x.double(),),
    "no gradient": lambda x: (x.detach(),),
    "another layout": lambda x: (x.detach().to_sparse().requires_grad_(),),
    "another device": lambda x: (x.to("meta"),),
}


@pytest.mark.parametrize("anomaly", ANOMALIES)
def test_anomalous_arguments_are_refused_as_on_the_ordinary_way_and_leave_nothing_behind(device, anomaly):
    model, twin = graphed_linear(device)
    x = batch(device)
    args = ANOMALIES[anomaly](x)
    kind, message = outcome(lambda: nn.Module.__call__(model, *args))
    assert issubclass(kind, ValueError)
    assert outcome(lambda: model(*args)) == (kind, message)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert (replays(model), model.te_graph.info()["in_flight"]) == (1, 0)


def test_keyword_instead_of_position_replays(device, slow):
    model, twin = graphed_linear(device)
    x = batch(device)
    assert_bitwise_equal(run(model, input=x), run(twin, input=x))
    assert (slow.taken(), replays(model)) == (1, 1)


def test_the_same_tensor_twice_gives_what_eager_execution_gives(device, slow):
    for on_mismatch in ("raise", "eager", "capture"):
        model = Mixer().to(device)
        model.weight = nn.Parameter(torch.randn(7, 7, device=device))
        twin = eager_copy(model)
        sample_args = tuple(torch.randn(3, 7, device=device, requires_grad=True) for _ in range(2))
        make_graphed_callables(model, sample_args, on_mismatch=on_mismatch)
        x = batch(device)
        slow.taken()
        assert_bitwise_equal(run(lambda x, model=model: model(x, x), x), run(lambda x, t=twin: t(x, x), x))
        assert slow.taken() > 0


def test_a_parameter_as_argument_replays_and_gets_its_gradient(device, slow):
    model, twin = graphed_and_twin(device)
    inputs = [nn.Parameter(sample(device)) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    for x, module in zip(inputs, (model, twin), strict=True):
        for _ in range(2):
            module(x).square().sum().backward()
    assert_bitwise_equal(inputs[0].grad, inputs[1].grad)
    assert (slow.taken(), replays(model)) == (0, 2)


def test_a_parameter_of_the_module_itself_as_argument_is_used_twice_as_in_eager_execution(device):
    model = nn.Linear(7, 3).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    results = []
    for module in (model, twin):
        module.weight.data.copy_(torch.arange(21.0).view(3, 7))
        result = module(module.weight)
        result.square().sum().backward()
        results.append([result.detach().clone(), gradients_of(dict(module.named_parameters()))])
    assert_bitwise_equal(*results)


def test_a_tensor_that_wraps_others_as_argument_ends_with_an_error_or_the_eager_result():
    run_alone("""
        import torch, te_graph
        from torch import nn
        from torch.testing._internal.two_tensor import TwoTensor

        model = nn.Linear(7, 5)
        x = torch.randn(3, 7)
        expected = model(TwoTensor(x, x.clone())).a
        te_graph.make_graphed_callables(model, (torch.randn(3, 7, requires_grad=True),))
        try:
            result = model(TwoTensor(x, x.clone()).requires_grad_())
        except (TypeError, ValueError, RuntimeError):
            pass
        else:
            assert torch.equal(result.a, expected)
    """)


# ---- Threads and lifetime ----


def test_threads_may_call_one_module_at_the_same_time(device):
    model = mlp(device)
    twin = eager_copy(model)
    with torch.no_grad():
        make_graphed_callables(model, (sample(device),), max_in_flight=4)
    inputs = [[sample(device) for _ in range(10)] for _ in range(4)]
    results: list[list] = [[] for _ in inputs]
    together = threading.Barrier(4)

    def work(number: int) -> None:
        together.wait()
        with torch.no_grad():
            results[number] = [outcome(lambda x=x: model(x)) for x in inputs[number]]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        assert_bitwise_equal(results, [[("result", twin(x)) for x in batches] for batches in inputs])
    assert replays(model) == 40


def in_another_thread(action: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


@pytest.mark.parametrize("chain", [False, True])
def test_a_result_that_another_thread_holds_is_not_moved_under_it(device, chain):
    """An operation may have read the address of a result just before a replay in another thread overwrites it."""
    models = [mlp(device), nn.Tanh()]
    twins = [eager_copy(model) for model in models]
    with torch.no_grad():
        make_graphed_callables(tuple(models), ((sample(device),), (twins[0](sample(device)),)), chain=chain)

        def forward(nets: list[nn.Module], x: Tensor) -> Tensor:  # [3, 7] -> [3, 5]
            with torch.no_grad():
                return nets[1](nets[0](x))

        first, second = sample(device), sample(device)
        kept = in_another_thread(lambda: forward(models, first))
        address = kept.data_ptr()
        with pytest.raises(RuntimeError, match=r"other threads hold results .* max_in_flight= at least the number of"):
            forward(models, second)
        assert kept.data_ptr() == address
        assert_bitwise_equal(kept, forward(twins, first))
        del kept
        for number in range(2):
            last = in_another_thread(lambda: forward(models, second)) if number else forward(models, second)
            assert_bitwise_equal(last, forward(twins, second))
            del last


def test_each_thread_has_its_own_grad_mode(device, slow):
    model, twin = graphed_and_twin(device)
    x = batch(device)
    seen: list = []
    with torch.no_grad():
        thread = threading.Thread(target=lambda: seen.append(run(model, x)))
        thread.start()
        thread.join()
        assert not model(x).requires_grad
    assert_bitwise_equal(seen, [run(twin, x)])
    assert (slow.taken(), replays(model)) == (1, 1)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_run_eagerly_and_leave_the_original_as_it_is(device, slow, duplicate):
    model, twin = graphed_linear(device)
    x = batch(device)
    run(model, x)
    model.zero_grad()
    other = duplicate(model)
    assert type(other) is nn.Linear
    assert type(other).__call__ is nn.Module.__call__
    assert_bitwise_equal(run(other, x), run(twin, x))
    assert replays(model) == 1
    other.zero_grad()
    assert_bitwise_equal(run(model, x)[0], run(twin, x)[0])
    assert (slow.taken(), replays(model)) == (0, 2)


def test_a_result_outlives_its_module(device):
    model, twin = graphed_and_twin(device)
    watch = weakref.ref(model)
    x, same = leaf_copy([batch(device)] * 2)
    result, expected = model(x), twin(same)
    del model
    assert watch() is None
    assert_bitwise_equal(result.detach(), expected.detach())
    result.square().sum().backward()
    expected.square().sum().backward()
    assert_bitwise_equal(x.grad, same.grad)


def test_a_module_that_nobody_else_holds_may_be_called(device):
    model, twin = graphed_and_twin(device)
    modules, x = [model], batch(device)
    del model
    assert_bitwise_equal(run(lambda x: modules.pop()(x), x), run(twin, x))


def test_after_reset_the_class_is_the_old_one_and_calls_are_eager(device, slow):
    model, twin = graphed_linear(device)
    handle = model.te_graph
    run(model, batch(device))
    model.zero_grad()
    handle.reset()
    assert type(model) is nn.Linear
    assert handle.fast_call is None
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert (slow.taken(), handle.info()["forward_replays"]) == (0, 1)


def test_a_reset_by_what_the_callable_runs_lets_the_replay_end():
    """The recorder replays Python: an operator of the user's may do anything."""
    run_alone("""
        import gc, queue, torch, te_graph
        from torch import nn

        victims = queue.SimpleQueue()  # no guard looks into it

        @torch.library.custom_op("te_graph_fast_call_test::same", mutates_args=())
        def same(x: torch.Tensor) -> torch.Tensor:
            while not victims.empty():
                victims.get().te_graph.reset()
                gc.collect()
            return x.clone()

        same.register_autograd(lambda context, grad: grad)

        class Net(nn.Linear):
            def forward(self, x):
                return same(super().forward(x)) * 2

        model = Net(7, 5)
        te_graph.make_graphed_callables(model, (torch.randn(3, 7, requires_grad=True),))
        victims.put(model)
        x = torch.randn(3, 7, requires_grad=True)
        result = model(x)
        assert torch.equal(result, nn.functional.linear(x, model.weight, model.bias) * 2)
        result.sum().backward()
        assert model.weight.grad is not None
    """)


def test_one_forward_too_many_is_refused_as_on_the_ordinary_way(device):
    model, _ = graphed_linear(device)
    x = batch(device)
    held = model(x)
    refused = outcome(lambda: nn.Module.__call__(model, x))
    assert refused[0] is RuntimeError and "max_in_flight=2" in refused[1]
    assert outcome(lambda: model(x)) == refused
    del held
    assert model(x).requires_grad


def test_captures_for_other_arguments_take_turns(device, slow):
    model, twin = graphed_and_twin(device, on_mismatch="capture")
    for rows, is_slow in ((3, False), (2, True), (2, False), (3, True), (3, False), (2, True), (2, False)):
        x = torch.randn(rows, 7, device=device, requires_grad=True)
        slow.taken()
        assert_bitwise_equal(run(model, x), run(twin, x))
        assert (slow.taken() > 0) == is_slow, rows
    assert model.te_graph.info()["recaptures"] == 1
    assert_bitwise_equal(gradients_of(dict(model.named_parameters())), gradients_of(dict(twin.named_parameters())))
