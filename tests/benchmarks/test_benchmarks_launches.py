"""benchmarks/lib/launches.py: traces written out here, a real one of the CPU, and known launches on a GPU."""

import pytest
import torch
from profiled_launches import launches

MAIN, ENGINE = 11, 12  # threads


def event(cat: str, name: str, start: float, length: float, thread: int = MAIN) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "pid": 1, "tid": thread}


@pytest.fixture
def trace():
    """Events of a step from 100 to 200, and of what surrounds it."""
    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    return [
        event("user_annotation", "benchmark step", 100, 100),
        event("gpu_user_annotation", "benchmark step", 130, 500, thread=7),
        event("cuda_runtime", "cudaLaunchKernel", 90, 5),  # before
        event("cuda_runtime", "cudaDeviceSynchronize", 201, 50),  # after
        event("cpu_op", "aten::copy_", 105, 10),
        event("cpu_op", "aten::mul", 106, 5, thread=ENGINE),  # meanwhile
        event("cuda_runtime", "cudaMemcpyAsync", 107, 3),
        event("cuda_runtime", "cudaGraphLaunch", 120, 5),
        event("kernel", "inside the graph", 125, 5, thread=7),
        event("cuda_runtime", "cudaGraphLaunch", 130, 5, thread=ENGINE),
        event("cpu_op", node, 140, 30, thread=ENGINE),
        event("cpu_op", "torch::autograd::AccumulateGrad", 141, 28, thread=ENGINE),
        event("cpu_op", "aten::add_", 145, 10, thread=ENGINE),
        event("cuda_runtime", "cudaLaunchKernel", 148, 4, thread=ENGINE),
        event("kernel", "add", 155, 2, thread=7),
        event("cuda_runtime", "cudaLaunchKernelExC", 160, 4, thread=ENGINE),
        event("cuda_driver", "cuLaunchKernelEx", 161, 2, thread=ENGINE),  # by the runtime
        event("cuda_driver", "cuLaunchKernel", 175, 2),  # by itself
        event("cuda_runtime", "cudaStreamIsCapturing", 180, 1),
        event("cuda_runtime", "cudaStreamSynchronize_v3020", 190, 1),
    ]


def test_launches_of_the_step_are_counted_and_named_by_node_and_operator(trace):
    assert launches.count_launches(trace) == {
        "graphs": 2,
        "outside_graphs": 4,
        "outside_by_operator": {
            "aten::copy_": 1,
            "torch::autograd::AccumulateGrad > aten::add_": 1,
            "torch::autograd::AccumulateGrad": 1,
            "cuLaunchKernel": 1,
        },
        "waits": 1,
    }


def test_what_the_device_runs_is_counted_in_graphs_and_outside(trace):
    trace += [event("gpu_memcpy", "Memcpy DtoD", 158, 2, thread=7), event("gpu_memset", "Memset", 165, 1, thread=7)]
    assert launches.count_device_work(trace) == {"kernels": 4, "seconds": pytest.approx(10e-6)}
    with pytest.raises(RuntimeError, match="expected kernels in the trace of a step, got none"):
        launches.count_device_work([one for one in trace if one["tid"] != 7])


@pytest.mark.parametrize(
    "name",
    ["cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMalloc", "cudaFree"],
)
def test_calls_that_wait_for_the_device_are_counted(trace, name):
    trace.append(event("cuda_runtime", name, 195, 1))
    assert launches.count_launches(trace)["waits"] == 2


def test_without_graphs_the_operators_are_not_listed(trace):
    counts = launches.count_launches([event for event in trace if event["name"] != "cudaGraphLaunch"])
    assert (counts["graphs"], counts["outside_graphs"], counts["outside_by_operator"]) == (0, 4, {})


def test_a_trace_without_any_launch_is_refused_since_the_profiler_saw_nothing(trace):
    outside = [event for event in trace if not event["cat"].startswith("cuda")]
    with pytest.raises(RuntimeError, match="expected launches in the trace of a step, got none"):
        launches.count_launches(outside)


def test_a_trace_holds_one_step_with_its_backward():
    calls, x = [], torch.randn(4, 4, requires_grad=True)

    def step() -> None:
        calls.append(1)
        (x @ x).sum().backward()

    events = launches.trace_step(step, "cpu")
    (found,) = (e for e in events if e.get("cat") == "user_annotation" and e["name"] == launches.STEP)
    names = [e["name"] for e in events if e.get("cat") == "cpu_op" and launches._holds(found, e)]
    assert names.count("aten::matmul") == 1 and len(calls) == 2
    assert f"{launches.NODE}torch::autograd::AccumulateGrad" in names


@pytest.mark.gpu
def test_known_launches_are_counted_on_a_gpu():
    x, host = torch.randn(64, device="cuda", requires_grad=True), torch.zeros(64).pin_memory()
    static, buffer = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    x.grad = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1).mul_(2).sub_(3)

    def step() -> None:
        graph.replay()
        graph.replay()
        buffer.copy_(host, non_blocking=True)
        x.view(8, 8).backward(buffer.view(8, 8))
        torch.cuda.current_stream().synchronize()

    step()
    assert launches.count_launches(launches.trace_step(step, "cuda")) == {
        "graphs": 2,
        "outside_graphs": 2,
        "outside_by_operator": {"aten::copy_": 1, "torch::autograd::AccumulateGrad > aten::add_": 1},
        "waits": 1,
    }
