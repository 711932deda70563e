"""Silent hazards of graph replay in how a callable is run: hooks, modes, checkpoints, second backwards, host reads.

The reference is eager execution of a copy of the same module on the same inputs.
"""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from hazards import assert_right_when_captured_again, batch
from sequences import called, captures, counts
from tensor_lists import all_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import backward_of, eager_copy, gradients_of, leaf_copy, run, snapshot, train

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def net(device: str, dropout: float = 0.0) -> nn.Sequential:
    first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.GELU())
    return nn.Sequential(first, nn.Linear(8, 4)).to(device)


REGISTRATIONS = {
    "forward hooks": lambda module, hook: module.register_forward_hook(hook),
    "forward pre-hooks": lambda module, hook: module.register_forward_pre_hook(hook),
    "backward hooks": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre-hooks": lambda module, hook: module.register_full_backward_pre_hook(hook),
}


def nothing(*_) -> None:
    """A hook."""


@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_hooks_of_a_submodule_present_at_capture_are_refused(device, kind):
    model = net(device)
    REGISTRATIONS[kind](model[0][2], nothing)
    sample = batch(device)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=rf"Sequential: 0\.2 has {kind}, which a replay would not run"):
        make_graphed_callables(model, (sample,))
    assert_bitwise_equal(snapshot(model), before)


@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_hooks_of_a_module_that_a_function_calls_are_refused_at_capture(device, kind):
    model = net(device)
    REGISTRATIONS[kind](model[1], nothing)
    with pytest.raises(RuntimeError, match=rf"closure variable model\.1 has {kind}, which a replay would not run"):
        make_graphed_callables(lambda x: model(x), (batch(device),))


@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_a_submodule_hook_added_after_capture_is_refused_by_name_until_it_is_removed(device, kind):
    model = net(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    hook = REGISTRATIONS[kind](model[0][2], nothing)
    x = batch(device)
    with pytest.raises(RuntimeError, match=rf"Sequential: {kind} of 0\.2 changed .*reset\(\)"):
        model(x)
    hook.remove()
    assert_bitwise_equal(run(model, x), run(twin, x))


@pytest.mark.parametrize("before_capture", [True, False])
def test_hooks_of_the_graphed_module_itself_run_around_every_replay(device, before_capture):
    model = net(device)
    twin = eager_copy(model)
    seen = {id(model): [], id(twin): []}

    def register(module: nn.Module) -> None:
        def note(kind: str, result: Callable) -> Callable:
            def hook(_, *values: object) -> object:
                seen[id(module)].append((kind, leaf_copy(values)))
                return result(values)

            return hook

        module.register_forward_pre_hook(note("pre", lambda values: (values[0][0] * 2,)))
        module.register_forward_hook(note("forward", lambda values: values[1] * 3))
        module.register_full_backward_hook(note("backward", lambda values: (values[0][0] * 5,)))
        module.register_full_backward_pre_hook(note("backward pre", lambda values: (values[0][0] * 7,)))

    register(twin)
    if before_capture:
        register(model)
    make_graphed_callables(model, (batch(device),))
    if not before_capture:
        register(model)
    for x in (batch(device), batch(device)):
        assert_bitwise_equal(run(model, x), run(twin, x))
    assert len(seen[id(model)]) == 8
    assert_bitwise_equal(seen[id(model)], seen[id(twin)])
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def test_hooks_of_parameters_added_and_removed_after_capture_run_as_in_eager_execution(device):
    model = net(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    counts = {id(model): 0, id(twin): 0}

    def step(module: nn.Module, x: Tensor) -> list:
        def clip(parameter: Tensor) -> None:
            counts[id(module)] += 1
            parameter.grad.clamp_(-0.1, 0.1)

        hooks = [
            module[1].weight.register_hook(lambda grad: grad * 3),
            module[1].bias.register_post_accumulate_grad_hook(clip),
        ]
        seen = [run(module, x)]
        for hook in hooks:
            hook.remove()
        return [*seen, run(module, x), gradients_of(list(module.parameters()))]

    for x in (batch(device), batch(device)):
        assert_bitwise_equal(step(model, x), step(twin, x))
    assert counts == {id(model): 2, id(twin): 2}


def test_a_submodule_switched_to_eval_after_capture_is_refused_by_name(device):
    model = net(device, dropout=0.5)
    make_graphed_callables(model, (batch(device),))
    model[0][1].eval()
    with pytest.raises(RuntimeError, match=r"Sequential: training flag of 0\.1 is now False .*reset\(\)"):
        model(batch(device))
    assert_right_when_captured_again(model, batch(device), batch(device))


def test_eval_mode_and_no_grad_run_eagerly_and_leave_waiting_activations_alone(device):
    model = net(device, dropout=0.5)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x, longer = batch(device), torch.randn(7, 4, device=device)

    def interrupted(call: nn.Module) -> list:
        torch.manual_seed(3)
        leaf = leaf_copy(x)
        output = call(leaf)
        with torch.no_grad():
            seen = [call(x), call(longer)]
        call.eval()
        seen += [run(call, x), run(call, longer)]
        with torch.inference_mode():
            seen.append(call(longer).clone())
        call.train()
        backward_of(output)
        return [output.detach(), leaf.grad, gradients_of(list(call.parameters())), seen]

    assert_bitwise_equal(interrupted(model), interrupted(twin))
    info = model.te_graph.info()
    assert (info["forward_replays"], info["backward_replays"]) == (1, 1)
    assert sum(info["eager_calls"].values()) == 5


@pytest.mark.parametrize("training", [False, True])
def test_what_was_captured_in_eval_mode_or_without_gradients_replays_there_alone(device, training):
    model = net(device, dropout=0.5).train(training)
    twin = eager_copy(model)
    with torch.set_grad_enabled(not training):
        make_graphed_callables(model, (batch(device).detach().requires_grad_(not training),))
    x = batch(device).detach().requires_grad_(not training)
    for mode in (training, not training, training):
        for gradients in (True, False):
            results = []
            for call in (model.train(mode), twin.train(mode)):
                torch.manual_seed(4)
                with torch.set_grad_enabled(gradients):
                    results.append(leaf_copy(call(x)))
            assert_bitwise_equal(*results)
    assert model.te_graph.info()["forward_replays"] == 2


class Checkpointed(nn.Module):
    """Recomputes its first part in the backward."""

    def __init__(self, device: str, dropout: float, reentrant: bool, preserve: bool) -> None:
        super().__init__()
        self.body, self.head = net(device, dropout), nn.Linear(4, 4).to(device)
        self.options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.head(checkpoint(self.body, x, **self.options))


def test_a_checkpoint_inside_the_callable_is_right(device):
    model = Checkpointed(device, dropout=0.0, reentrant=False, preserve=False)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    steps = [[(batch(device),) for _ in range(2)] for _ in range(3)]
    assert_bitwise_equal(train(model, steps), train(twin, steps))
    assert model.te_graph.info()["backward_replays"] == 6


@pytest.mark.parametrize(("dropout", "reentrant"), [(0.5, False), (0.0, True), (0.5, True)])
def test_a_checkpoint_that_a_graph_cannot_hold_is_refused_without_a_trace_else_it_is_right(device, dropout, reentrant):
    model = Checkpointed(device, dropout, reentrant, preserve=True)
    twin, sample = eager_copy(model), batch(device)
    before = snapshot(model)
    try:
        make_graphed_callables(model, (sample,))
    except RuntimeError as error:
        assert_bitwise_equal(snapshot(model), before)
        if reentrant:
            assert 'gradient_checkpointing_kwargs={"use_reentrant": False}' in str(error)
        return
    steps = [[(batch(device),) for _ in range(2)] for _ in range(2)]
    torch.manual_seed(5)
    seen = train(model, steps)
    torch.manual_seed(5)
    assert_bitwise_equal(seen, train(twin, steps))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_does_not_stop_a_capture(device):
    """It looks for NaN on the host in each backward, which graphed() leaves to eager execution."""
    model, x = net(device), batch(device)
    eager = eager_copy(model)
    step = graphed(lambda x: torch.autograd.grad(eager(x).square().sum(), list(eager.parameters())))
    with torch.autograd.set_detect_anomaly(True):
        make_graphed_callables(model, (batch(device),))
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        for _ in range(3):
            assert_bitwise_equal(run(model, x), run(eager, x))
            assert_bitwise_equal(step(x.detach()), step.__wrapped__(x.detach()))
    assert model.te_graph.info()["forward_replays"] == 3
    assert sum(step.info()["eager_calls"].values()) == 3
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        for _ in range(3):
            assert_bitwise_equal(step(x.detach()), step.__wrapped__(x.detach()))
    assert captures(step) == 1


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
class RootOfWeight(nn.Module):
    """x [n, 3] -> [n, 3], whose weight alone has NaN as gradient where it is 0."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.detach() * torch.sqrt(self.weight * 0)


@pytest.mark.parametrize("is_later", [False, True])
def test_anomaly_detection_finds_nan_in_the_gradient_of_a_parameter(device, is_later):
    module, x = RootOfWeight(device), torch.randn(2, 3, device=device, requires_grad=True)
    make_graphed_callables(module, (x.detach().requires_grad_(),))
    for _ in range(3 * is_later):
        module(x).sum().backward()
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="the backward returned nan values in the gradient of weight"):
            module(x).sum().backward()
    module(x).sum().backward()
    assert bool(module.weight.grad.isnan().all())


class RootOfSum(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8, device=device), nn.Linear(8, 4, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer((self.inner(x) * x.sum()).abs().sqrt())


@pytest.mark.parametrize("with_main_grads", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_nan_that_anomaly_detection_finds_is_not_in_the_gradients(device, steps, with_main_grads):
    """Of a training that skips such a microbatch, as in eager execution: all are added to what was there."""
    eager = RootOfSum(device)
    graphed_module = copy.deepcopy(eager)
    for parameter in graphed_module.parameters() if with_main_grads else ():
        parameter.main_grad = torch.zeros_like(parameter)
    samples = [torch.randn(3, 4, device=device) for _ in range(steps + 1)]
    make_graphed_callables(graphed_module, (samples[0],))

    def gradients(module: nn.Module) -> list[torch.Tensor]:
        kept = "main_grad" if with_main_grads and module is graphed_module else "grad"
        return [getattr(parameter, kept) for parameter in module.parameters()]

    for module in (eager, graphed_module):
        for sample in samples:
            module(sample).sum().backward()
        before = [grad.clone() for grad in gradients(module)]
        with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError, match="returned nan values"):
                module(torch.zeros(3, 4, device=device)).sum().backward()
            if module is graphed_module:  # eager execution has got as far as the gradients of `outer`
                assert all_same_bits(gradients(module), before)
            else:
                assert all(bool(grad.isfinite().all()) for grad in gradients(module))
        for grad in gradients(module):
            grad.zero_()
        with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module(samples[0]).sum().backward()
    assert all_same_bits(gradients(graphed_module), gradients(eager))


def test_anomaly_detection_finds_nan_in_a_graphed_function(device):
    weight = torch.zeros(3, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    step = graphed(lambda: (weight.sqrt() * 0.0).sum().backward())
    called(step, 3)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"):
        step()
    assert counts(step) == (1, 2, 0, 2)


def test_double_backward_is_refused(device):
    model = net(device)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    with pytest.raises(RuntimeError, match=r"Sequential: does not support double backward \(create_graph=True\)"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward")  # of a reference cycle, once in a process
        with pytest.raises(RuntimeError, match="does not support double backward"):
            model(x).sum().backward(create_graph=True)
    assert all(p.grad is None for p in model.parameters())


def test_a_second_backward_without_retain_graph_is_refused(device):
    model = net(device)
    make_graphed_callables(model, (batch(device),))
    output = model(batch(device))
    backward_of(output)
    kept = gradients_of(list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"Sequential: backward a second time: .*retain_graph=True"):
        backward_of(output)
    assert_bitwise_equal(gradients_of(list(model.parameters())), kept)


def test_a_second_backward_after_retain_graph_is_right_and_keeps_the_slot(device):
    model = net(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x, other = batch(device), batch(device)

    def twice(call: nn.Module) -> list:
        leaf = leaf_copy(x)
        output = call(leaf)
        backward_of(output, retain_graph=True)
        if call is model:
            with pytest.raises(RuntimeError, match=r"Sequential: .*max_in_flight=2"):
                model(other)
        output.square().sum().backward(retain_graph=True)
        backward_of(output)
        return [leaf.grad, gradients_of(list(call.parameters())), run(call, other)]

    assert_bitwise_equal(twice(model), twice(twin))


def reads_item(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
    return x * x.sum().item()


def branches_on_data(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
    return x * 2 if x.sum() > 0 else x


def selects_by_data(x: Tensor) -> Tensor:  # [3, 4] -> [..., 4]
    return x[x[:, 0] > -100]


@pytest.mark.parametrize("function", [reads_item, branches_on_data, selects_by_data])
def test_what_depends_on_data_in_python_is_refused_without_a_trace(device, function):
    sample = batch(device)
    before = snapshot()
    with pytest.raises(RuntimeError) as refusal:
        make_graphed_callables(function, (sample,))
    assert_bitwise_equal(snapshot(), before)
    if device == "cpu":
        line = function.__code__.co_firstlineno + 1
        assert f"test_hazards_modes.py:{line} in {function.__name__}" in str(refusal.value)
    replaying = make_graphed_callables(torch.sin, (sample,))
    assert_bitwise_equal(run(replaying, sample), run(torch.sin, sample))


@pytest.mark.gpu
def test_replays_on_changing_streams_are_ordered_one_after_the_other():
    model = net("cuda")
    twin = eager_copy(model)
    make_graphed_callables(model, (batch("cuda"),))
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [batch("cuda") for _ in range(12)]
    expected = [run(twin, x) for x in inputs]
    torch.cuda.synchronize()
    seen = []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            seen.append(run(model, x))
    torch.cuda.synchronize()
    assert_bitwise_equal(seen, expected)
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))
