"""Silent hazards of graph replay in what a capture could disturb or freeze: generators, buffers, hooks, settings.

The reference is eager execution of a copy of the same module on the same inputs, from the same generator state.
"""

import gc
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import eager_copy, gradients_of, leaf_copy, run, snapshot, train

from te_graph import make_graphed_callables, reset_main_grads
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def batch(device: str) -> Tensor:  # [6, 4]
    return torch.randn(6, 4, device=device, requires_grad=True)


def stateful(device: str) -> nn.Sequential:
    """Dropout draws random numbers, batch norm updates buffers."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).to(device)


def test_replays_draw_the_random_numbers_that_eager_execution_draws_in_their_place(device, seed):
    model = stateful(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    inputs = [batch(device) for _ in range(3)]

    def loop(call: nn.Module) -> list:
        torch.manual_seed(seed)
        seen = []
        for x in inputs:
            seen += [run(call, x), F.dropout(x.detach()), torch.rand(3, device=device)]
        return seen

    assert_bitwise_equal(loop(model), loop(twin))


def test_each_replay_draws_fresh_numbers(device):
    model = nn.Dropout(0.5)
    make_graphed_callables(model, (torch.ones(64, device=device),))
    first, second = (model(torch.ones(64, device=device)) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_generator_of_its_own_is_refused(device):
    generator = torch.Generator(device).manual_seed(0)

    def noisy(x: Tensor) -> Tensor:  # [6, 4] -> [6, 4]
        return x + torch.empty_like(x).normal_(generator=generator)

    with pytest.raises(RuntimeError, match=r"generator|normal"):
        make_graphed_callables(noisy, (batch(device),))


def test_seeding_inside_the_callable_is_refused(device):
    def reseeding(x: Tensor) -> Tensor:  # [6, 4] -> [6, 4]
        torch.manual_seed(0)
        return F.dropout(x)

    before = snapshot()
    x = torch.ones(6, 4, device=device)
    with pytest.raises(RuntimeError, match=r"manual_seed|seed"):
        make_graphed_callables(reseeding, (x,))
    assert_bitwise_equal(snapshot(), before)


@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
def test_warm_up_and_capture_leave_no_trace(device, iterations):
    model = stateful(device)
    run(model, batch(device))
    model[3].weight.grad = None
    model[0].weight.main_grad = torch.randn_like(model[0].weight)
    called = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: called.append("hook"))
        parameter.register_post_accumulate_grad_hook(lambda p: called.append("post-accumulate hook"))
    model.register_forward_hook(lambda *_: called.append("forward hook"))
    sample = batch(device)
    kept, before = leaf_copy(sample), snapshot(model)
    make_graphed_callables(model, (sample,), num_warmup_iters=iterations)
    graphed_class, handle = type(model), model.te_graph
    model.te_graph.reset()
    assert graphed_class is not type(model)
    assert handle.info()["graphs"] == 0
    assert_bitwise_equal(snapshot(model), before)
    assert_bitwise_equal(sample, kept)
    assert sample.grad is None
    assert called == []


def test_running_statistics_follow_the_replays_alone(device):
    model = stateful(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), max_in_flight=2)
    assert_bitwise_equal(dict(model[1].named_buffers()), dict(twin[1].named_buffers()))
    steps = [[(batch(device),) for _ in range(2)] for _ in range(2)]
    torch.manual_seed(1)
    seen = train(model, steps)
    torch.manual_seed(1)
    assert_bitwise_equal(seen, train(twin, steps))
    assert model[1].num_batches_tracked == 4


class Fuse:
    """Raises when a direction is passed the given number of times."""

    def __init__(self, direction: str, number: int, error: Callable[[], None]) -> None:
        # A failed capture takes back what it changed in containers, and this is to be seen afterwards.
        self.passes = {name: io.BytesIO() for name in ("forward", "backward")}
        self.direction, self.number, self.error = direction, number, error

    def burn(self, direction: str) -> None:
        self.passes[direction].write(b".")
        if self.passes[direction].tell() == self.number and direction == self.direction:
            self.error()


class Fused(torch.autograd.Function):
    """Identity that burns a fuse whenever its forward or backward runs."""

    @staticmethod
    def forward(ctx, x: Tensor, fuse: Fuse) -> Tensor:  # [...] -> [...]
        ctx.fuse = fuse
        fuse.burn("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # [...] -> [...]
        ctx.fuse.burn("backward")
        return grad.clone(), None


class Fragile(nn.Module):
    """Batch norm, dropout and linear layers around a fuse."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.inner, self.tail, self.fuse = stateful("cpu"), nn.Linear(4, 4), fuse

    def forward(self, x: Tensor) -> Tensor:  # [6, 4] -> [6, 4]
        return self.tail(Fused.apply(self.inner(x), self.fuse))


class Mine(Exception):
    """An exception of the user's own."""


def raise_mine() -> None:
    raise Mine("on purpose")


def read_on_host() -> None:
    torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu").add(1).item()


WARM_UPS = 2
STAGES = [
    ("forward", 1, raise_mine),
    ("forward", WARM_UPS, raise_mine),
    ("forward", WARM_UPS + 1, raise_mine),
    ("backward", 1, raise_mine),
    ("backward", WARM_UPS, raise_mine),
    ("backward", WARM_UPS + 1, raise_mine),
    ("forward", WARM_UPS + 1, read_on_host),
    ("backward", WARM_UPS + 1, read_on_host),
]


def test_a_flag_set_for_one_model_is_not_seen_by_another(device):
    """The flag says that the next backward overwrites ``main_grad``: there is one for each parameter, not for all."""
    models = [nn.Linear(4, 4).to(device, torch.bfloat16) for _ in range(3)]
    twins, samples = [eager_copy(model) for model in models], (batch(device).bfloat16().detach(),)
    make_graphed_callables(models[0], samples, grad_dtype=torch.float32)
    make_graphed_callables(tuple(models[1:]), (samples, samples), grad_dtype=torch.float32)
    sums: dict[int, list[Tensor]] = {}
    for resets in ((), (0,), (1,), (2,), (0, 2)):
        for number in resets:
            reset_main_grads(list(models[number].parameters()))
            sums.pop(number)
        x = batch(device).bfloat16().detach()
        for number, (model, twin) in enumerate(zip(models, twins, strict=True)):
            run(model, x)
            run(twin, x)
            grads = [parameter.grad.float() for parameter in twin.parameters()]
            sums[number] = [one + other for one, other in zip(sums.get(number, [0, 0]), grads, strict=True)]
            twin.zero_grad()
        found = {number: [p.main_grad for p in model.parameters()] for number, model in enumerate(models)}
        assert_bitwise_equal(found, {number: sums[number] for number in found})


@pytest.mark.parametrize(("direction", "number", "error"), STAGES)
def test_a_capture_that_fails_leaves_no_trace_and_the_next_one_works(device, direction, number, error):
    fuse = Fuse(direction, number, error)
    good, bad = stateful(device), Fragile(fuse).to(device)
    run(bad.inner, batch(device))
    bad.tail.weight.grad = torch.randn_like(bad.tail.weight)
    samples = (batch(device),), (batch(device),)
    before = snapshot(good, bad)
    with pytest.raises(Mine if error is raise_mine else RuntimeError), torch.autocast(device, cache_enabled=False):
        make_graphed_callables((good, bad), samples, num_warmup_iters=WARM_UPS)
    assert fuse.passes[direction].tell() == number
    assert_bitwise_equal(snapshot(good, bad), before)
    assert not hasattr(good, "te_graph")

    fuse.direction = "never"
    twins = eager_copy(good), eager_copy(bad)
    make_graphed_callables((good, bad), samples, num_warmup_iters=WARM_UPS)
    steps = [[(batch(device),) for _ in range(2)] for _ in range(2)]
    for model, twin in zip((good, bad), twins, strict=True):
        torch.manual_seed(2)
        seen = train(model, steps, set_to_none=False)
        torch.manual_seed(2)
        assert_bitwise_equal(seen, train(twin, steps, set_to_none=False))


def test_a_capture_that_fails_takes_back_the_main_grads_that_it_created(device):
    model = Fragile(Fuse("backward", WARM_UPS + 1, raise_mine)).to(device, torch.bfloat16)
    sample = batch(device).detach().bfloat16()
    before = snapshot(model)
    with pytest.raises(Mine):
        make_graphed_callables(model, (sample,), num_warmup_iters=WARM_UPS, grad_dtype=torch.float32)
    assert_bitwise_equal(snapshot(model), before)
    make_graphed_callables(model, (sample,), grad_dtype=torch.float32)
    assert all(p.main_grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_on_or_off_as_before(device, enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        make_graphed_callables(nn.Linear(4, 4).to(device), (batch(device),))
        assert gc.isenabled() is enabled
        with pytest.raises(Mine):
            make_graphed_callables(Fragile(Fuse("forward", 1, raise_mine)).to(device), (batch(device),))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_other_instances_of_a_graphed_class_stay_as_they_are(device):
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model, bystander = nn.Sequential(inner, nn.Linear(4, 4)).to(device), stateful(device)
    twin, call = eager_copy(model), nn.Sequential.__call__
    make_graphed_callables(model, (batch(device),))
    assert (type(bystander), type(inner)) == (nn.Sequential, nn.Sequential)
    assert nn.Sequential.__call__ is call
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert_bitwise_equal(run(inner, x), run(twin[0], x))
    assert model.te_graph.info()["forward_replays"] == 1
    for one, other in ((model, twin), (inner, twin[0])):
        assert_bitwise_equal(gradients_of(list(one.parameters())), gradients_of(list(other.parameters())))


def test_autocast_is_part_of_the_capture(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(device)
    twin = eager_copy(model)
    inputs = [batch(device) for _ in range(2)]
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        make_graphed_callables(model, (batch(device),))
    for x in inputs:
        seen = []
        for call in (model, twin):
            leaf = leaf_copy(x)
            with torch.autocast(device, torch.bfloat16, cache_enabled=call is twin):
                output = call(leaf)
            assert output.dtype is torch.bfloat16
            output.float().square().sum().backward()
            seen.append([output.detach(), leaf.grad, gradients_of(list(call.parameters()))])
        assert_bitwise_equal(*seen)


class Product(torch.autograd.Function):
    """x @ w with a backward that autocast would run in another precision."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:  # [6, 4], [4, 4] -> [6, 4]
        ctx.save_for_backward(x, w)
        return (x[:, :, None] * w).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # [6, 4] -> [6, 4], [4, 4]
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


def test_the_backward_of_a_capture_under_autocast_runs_without_autocast(device):
    weight = torch.randn(4, 4, device=device, requires_grad=True)

    def product(x: Tensor) -> Tensor:  # [6, 4] -> [6, 4]
        return Product.apply(x, weight)

    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        graphed = make_graphed_callables(product, (batch(device),))
    x, seen = batch(device), []
    for call in (graphed, product):
        leaf, weight.grad = leaf_copy(x), None
        with torch.autocast(device, torch.bfloat16):
            output = call(leaf)
        output.square().sum().backward()
        seen.append([output.detach(), leaf.grad, weight.grad.clone()])
    assert_bitwise_equal(*seen)


def test_a_replay_under_other_autocast_settings_than_the_capture_is_refused(device):
    model = nn.Linear(4, 4).to(device)
    make_graphed_callables(model, (batch(device),))
    with (
        torch.autocast(device, torch.bfloat16),
        pytest.raises(RuntimeError, match=r"autocast is now on \(capture under"),
    ):
        model(batch(device))
    model.te_graph.reset()
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        make_graphed_callables(model, (batch(device),))
    with pytest.raises(RuntimeError, match=r"Linear: autocast is now off .*reset\(\)"):
        model(batch(device))
    with torch.autocast(device, torch.float16), pytest.raises(RuntimeError, match="the dtype of autocast changed"):
        model(batch(device))


def test_autocast_inside_the_callable_is_captured(device):
    model = nn.Linear(4, 4).to(device)

    def mixed(x: Tensor) -> Tensor:  # [6, 4] -> [6, 4]
        with torch.autocast(device, torch.bfloat16):
            x = model(model(x))
        return x.float() * 2

    graphed = make_graphed_callables(mixed, (batch(device),))
    x = batch(device)
    seen = []
    for call in (graphed, mixed):
        seen.append([run(call, x), gradients_of(list(model.parameters()))])
        model.zero_grad()
    assert_bitwise_equal(*seen)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: torch.use_deterministic_algorithms(False), "torch.use_deterministic_algorithms changed"),
        (lambda: torch.set_float32_matmul_precision("medium"), "float32 precision of matrix products"),
    ],
)
def test_other_global_settings_than_at_capture_are_refused_by_name(device, change, words):
    torch.set_float32_matmul_precision("highest")
    model = nn.Linear(4, 4).to(device)
    make_graphed_callables(model, (batch(device),))
    try:
        change()
        with pytest.raises(RuntimeError, match=f"Linear: .*{words}"):
            model(batch(device))
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(True)
    run(model, batch(device))
    assert model.te_graph.info()["forward_replays"] == 1


def test_a_capture_between_backward_and_optimizer_step_keeps_the_gradients(device):
    model = nn.Linear(4, 4).to(device)
    model.bias.main_grad = torch.randn(4, device=device)
    twin = eager_copy(model)
    inputs = [batch(device) for _ in range(2)]
    run(model, inputs[0])
    run(twin, inputs[0])
    main_grad = model.bias.main_grad.clone()
    model.bias.grad = None
    make_graphed_callables(model, (batch(device),))
    assert_bitwise_equal(model.weight.grad, twin.weight.grad)
    assert_bitwise_equal(model.bias.main_grad, main_grad)
    run(model, inputs[1])
    run(twin, inputs[1])
    assert_bitwise_equal(model.weight.grad, twin.weight.grad)
    assert model.bias.grad is None
