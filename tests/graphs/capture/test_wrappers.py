"""Modules that wrap others and do more than a forward: refused by name, wherever a callable gets hold of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import WORLDS, Rank, Ranks, process_group, ranks_of
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from twins import eager_copy, gradients_of, run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
ranks = pytest.fixture(ranks_of, scope="module", params=[WORLDS[1], WORLDS[3]])  # this process has a group of its own


def batch(device: str = "cpu", rows: int = 2) -> Tensor:  # [rows, 4]
    return torch.randn(rows, 4, device=device, requires_grad=True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Hidden(nn.Module):
    """Holds a module where ``named_modules`` does not look."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = {"list": [inner]}

    def forward(self, x: Tensor) -> Tensor:  # [n, 4]
        return self.inner["list"][0](x)


def below(module: nn.Module) -> dict[str, Any]:
    """Callables that are, hold or call ``module``."""
    return {
        "itself": module,
        "submodule": nn.Sequential(nn.Tanh(), module),
        "hidden": Hidden(module),
        "closure": lambda x: module(x),
    }


PLACES = ["itself", "submodule", "hidden", "closure"]


def assert_refused(target: Any, words: str) -> None:
    parameters = list(target.parameters()) if isinstance(target, nn.Module) else []
    grads = gradients_of(parameters)
    with pytest.raises(TypeError, match=words):
        tg.make_graphed_callables(target, (batch(),))
    assert getattr(target, "te_graph", None) is None
    assert_bitwise_equal(gradients_of(parameters), grads)


@pytest.fixture(scope="module")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(Rank(0, 1, "cpu"), Path(tmp_path_factory.mktemp("alone")) / "rendezvous"):
        yield


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("place", PLACES)
def test_ddp_is_refused(place: str) -> None:
    assert_refused(below(DistributedDataParallel(network()))[place], r"graph ddp.module or its layers and keep the wr")


@pytest.mark.usefixtures("_alone")
def test_function_of_what_ddp_wraps_is_captured() -> None:
    ddp = DistributedDataParallel(network())
    graphed = tg.make_graphed_callables(lambda x: ddp.module(x), (batch(),))
    graphed(batch()).sum().backward()
    assert graphed.te_graph.info()["backward_replays"] == 1


@pytest.mark.parametrize("place", PLACES)
def test_data_parallel_is_refused(place: str) -> None:
    assert_refused(below(DataParallel(network()))[place], "DataParallel copies its module to several GPUs")


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("place", PLACES)
def test_fsdp2_is_refused(place: str) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    assert_refused(below(fully_shard(network(), mesh=mesh))[place], "FSDPModule gathers its parameters for each call")


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("place", PLACES)
def test_replicated_module_is_refused(place: str) -> None:
    from torch.distributed._composable.replicate import replicate

    assert_refused(below(replicate(network()))[place], "graph its layers")


@pytest.mark.parametrize("place", PLACES)
def test_fsdp1_is_refused(place: str) -> None:
    """A class of its name: the original needs a GPU."""

    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:  # [n, 4]
            return self.module(x)

    assert_refused(below(FullyShardedDataParallel(network()))[place], "gathers its parameters for each call")


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("place", PLACES)
def test_dtensor_parameter_is_refused(place: str) -> None:
    from torch.distributed.tensor import distribute_module

    module = distribute_module(network(), dist.init_device_mesh("cpu", (1,)))
    assert_refused(below(module)[place], "its weight is a DTensor")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, batch())])
def test_module_of_torchscript_is_refused(place: str, make: Callable) -> None:
    assert_refused(below(make(network()))[place], "ScriptModule keeps its parameters where a guard cannot follow them")


@pytest.mark.usefixtures("_alone")
def test_fsdp2_after_capture_is_refused_at_the_call_and_reset_leaves_it_sharded() -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    module = tg.make_graphed_callables(nn.Linear(4, 4), (batch(),))
    twin = eager_copy(module)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match=r"since capture.*wrapped: FSDPModule gathers"):
        module(batch())
    module.te_graph.reset()
    assert isinstance(module, FSDPModule)
    x = batch()
    assert torch.equal(module(x), twin(x))


def unequal_data(rank: Rank, what: str) -> None:
    """Two micro-steps on data that differ from rank to rank, beside an eager model under a wrapper of its own."""
    model = network().to(rank.device)
    eager = DistributedDataParallel(eager_copy(model))
    ddp = DistributedDataParallel(model)
    targets = {"ddp.module": ddp.module, "layers": (ddp.module[0], ddp.module[2])}[what]
    widths = (4, 8) if what == "layers" else (4,)
    samples = tuple((torch.randn(3, w, device=rank.device, requires_grad=True),) for w in widths)
    tg.make_graphed_callables(targets, samples if what == "layers" else samples[0])
    for step in range(3):
        x = torch.full((3, 4), float(rank.rank + 1 + step), device=rank.device, requires_grad=True)
        assert_bitwise_equal(run(ddp, x), run(eager, x))
        expected = gradients_of([*eager.parameters()])
        assert_bitwise_equal(gradients_of([*ddp.parameters()]), expected)
        total = torch.cat([grad.flatten() for grad in expected])
        gathered = [torch.empty_like(total) for _ in range(rank.world)]
        dist.all_gather(gathered, total)
        assert all(torch.equal(one, total) for one in gathered)
    assert ddp.module[0].weight.grad.count_nonzero() > 0
    first = targets[0] if what == "layers" else targets
    assert first.te_graph.info()["backward_replays"] == 3


@pytest.mark.parametrize("what", ["ddp.module", "layers"])
def test_gradients_are_synchronised_where_what_is_inside_is_graphed(ranks: Ranks, what: str, seed: int) -> None:
    ranks.run(unequal_data, seed, what)


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request: pytest.FixtureRequest) -> Iterator[Callable[[nn.Module], nn.Module]]:
    yield lambda module: torch.compile(module, backend=request.param)
    torch._dynamo.reset()


def assert_replays_as(module: nn.Module, twin: nn.Module, handle: Any, device: str) -> None:
    for count in range(1, 4):
        x = batch(device)
        assert_bitwise_equal(run(module, x), run(twin, x))
        assert_bitwise_equal(gradients_of([*module.parameters()]), gradients_of([*twin.parameters()]))
        assert handle.info()["forward_replays"] == handle.info()["backward_replays"] == count


@pytest.mark.parametrize("make", [network, lambda: nn.Linear(4, 4)])
def test_original_of_a_compiled_module_is_captured(device: str, compiled: Callable, make: Callable) -> None:
    module = make().to(device)
    twin = eager_copy(module)
    wrapper = compiled(module)
    names = [name for name, _ in wrapper.named_parameters()]
    assert tg.make_graphed_callables(wrapper, (batch(device),), autograd_params=names[:1]) is wrapper
    handle = module.te_graph
    assert wrapper.te_graph is handle
    assert [name for name, _ in wrapper.named_parameters()] == names
    assert_replays_as(wrapper, twin, handle, device)
    wrapper.te_graph.reset()
    x = batch(device)
    assert_bitwise_equal(run(wrapper, x), run(twin, x))


def test_compiled_module_inside_a_callable(device: str, compiled: Callable) -> None:
    inner = network().to(device)
    outer = nn.Sequential(nn.Linear(4, 4), compiled(inner), nn.Linear(4, 4)).to(device)
    twin = nn.Sequential(eager_copy(outer[0]), eager_copy(inner), eager_copy(outer[2]))
    tg.make_graphed_callables(outer, (batch(device),))
    assert_replays_as(outer, twin, outer.te_graph, device)
    inner.eval()
    with pytest.raises(RuntimeError, match=r"training flag of 1\._orig_mod.* since capture"):
        outer(batch(device))


def test_compiled_module_in_a_closure(device: str, compiled: Callable) -> None:
    inner = network().to(device)
    twin, wrapper = eager_copy(inner), compiled(inner)
    graphed = tg.make_graphed_callables(lambda x: wrapper(x) * 2, (batch(device),))
    x = batch(device)
    assert_bitwise_equal(run(graphed, x), run(lambda x: twin(x) * 2, x))
    assert graphed.te_graph.info()["forward_replays"] == 1


def test_module_compiled_without_breaks_replays_and_is_compiled_again_after_reset(device: str) -> None:
    compilations = []

    def backend(module: torch.fx.GraphModule, example_inputs: list) -> Callable:
        compilations.append(module)
        return module.forward

    module = network().to(device)
    twin = eager_copy(module)
    wrapper = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        tg.make_graphed_callables(wrapper, (batch(device),))
        module.zero_grad()
        twin.zero_grad()
        assert_replays_as(wrapper, twin, module.te_graph, device)
        assert compilations == []
        module.te_graph.reset()
    x = batch(device)
    assert_bitwise_equal(run(wrapper, x), run(twin, x))
    assert len(compilations) == 1
    torch._dynamo.reset()
