"""How bench_collectives.py drives vLLM's all-reduce, with vLLM's ops replaced by what writes down their calls."""

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from functools import partial

import pytest
import torch
from benchmark_scripts import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
processes = importlib.import_module("lib.rank_processes")
variants = importlib.import_module("cases.collectives.variants")
vllm_all_reduce = importlib.import_module("cases.collectives.vllm_all_reduce")
bench = importlib.import_module("bench_collectives")


def install_vllm(monkeypatch) -> list[tuple]:
    """Stands in for vLLM's ops; returns their calls. Memory that is allocated lies at 1000 and 2000, and another rank
    sees it at 1 more."""
    calls, places = [], iter((1000, 2000))

    def op(name, result):
        def call(*arguments):
            calls.append((name, *arguments))
            return result(*arguments)

        return call

    results = {
        "meta_size": lambda: 64,
        "allocate_shared_buffer_and_handle": lambda nbytes: (place := next(places), torch.tensor([place])),
        "open_mem_handle": lambda handle: int(handle) + 1,
        "init_custom_ar": lambda *arguments: 7,
        "get_graph_buffer_ipc_meta": lambda handle: ([1, 2], [3]),
    } | dict.fromkeys(("register_buffer", "all_reduce", "register_graph_buffers"), lambda *arguments: None)
    ops = types.ModuleType("vllm._custom_ops")
    vars(ops).update({name: op(name, result) for name, result in results.items()})
    package = types.ModuleType("vllm")
    package.__spec__, package._custom_ops = importlib.machinery.ModuleSpec("vllm", None), ops
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", ops)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2" if name == "vllm" else version(name))
    return calls


def test_vllm_reduces_captured_tensors_in_place_and_others_behind_a_copy(monkeypatch):
    calls, rank = install_vllm(monkeypatch), processes.Rank(1, 2, "cpu", None, print)

    def gather(found, mine, group):
        theirs = mine if torch.is_tensor(mine) else ([4, 5], [6])
        found[:] = [theirs, mine]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    vllm = vllm_all_reduce.VllmAllReduce(rank, 512)
    allocated = [call[1] for call in calls if call[0] == "allocate_shared_buffer_and_handle"]
    assert allocated == [64 + 512, 512] and vllm.x.shape == (512,)
    (init,) = (call for call in calls if call[0] == "init_custom_ar")
    assert (init[1], init[3:]) == ([1001, 1000], (1, True)) and calls[-1] == ("register_buffer", 7, [2001, 2000])
    x, out = vllm.x.view(torch.bfloat16), torch.empty(256, dtype=torch.bfloat16)
    for is_capturing, staging in [(False, (2000, 512)), (True, (0, 0))]:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_capturing=is_capturing: is_capturing)
        vllm.reduce(out, x)
        name, handle, *tensors = calls[-1][:4]
        assert (name, handle) == ("all_reduce", 7) and tensors[0] is x and tensors[1] is out
        assert calls[-1][4:] == staging
    vllm.map_captured()
    assert calls[-1] == ("register_graph_buffers", 7, [[4, 5], [1, 2]], [[6], [3]])


def test_the_variant_reduces_its_part_of_the_one_input_and_maps_it_once_captured(monkeypatch):
    calls = install_vllm(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, mine, group: found.__setitem__(0, mine))
    rank = processes.Rank(0, 1, "cpu", None, print)
    vllm = vllm_all_reduce.VllmAllReduce(rank, 4096)
    setting = types.SimpleNamespace(rank=rank, vllm=vllm, empty=partial(torch.empty, dtype=torch.bfloat16))
    call = variants.VARIANTS["vllm"].build(setting, "all_reduce", 1024)
    assert (call.x.shape, call.x.dtype, call.x.data_ptr()) == ((512,), torch.bfloat16, vllm.x.data_ptr())
    assert (call.result.shape, call.result.dtype) == ((512,), torch.bfloat16)
    call.run()
    assert calls[-1][:2] == ("all_reduce", 7) and calls[-1][2] is call.x and calls[-1][3] is call.result
    call.captured()
    assert calls[-1] == ("register_graph_buffers", 7, [[1, 2]], [[3]])


def test_what_was_captured_is_mapped_before_the_first_replay(monkeypatch):
    events = []

    class Graph:
        def replay(self):
            events.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: contextlib.nullcontext())
    x = torch.zeros(1)
    call = variants.Call(x, lambda: events.append("run"), x, lambda: events.append("captured"))
    bench.capture(call, 2, processes.Rank(0, 1, "cuda:0", None, print))()
    assert events == ["run", "run", "captured", "replay"]


def test_vllm_is_measured_where_it_is_installed_and_knows_the_number_of_ranks(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert bench.BENCHMARK.parse_args([]).not_measured == {"vLLM": "vllm is not installed"}
    install_vllm(monkeypatch)
    options = bench.BENCHMARK.parse_args(["--world=6", "--quick"])
    assert options.variants == list(variants.VARIANTS) and variants.label_of("vllm", "cuda") == "vLLM 1.2"
    options = bench.BENCHMARK.parse_args(["--world=3", "--quick"])
    assert options.not_measured == {"vLLM 1.2": "needs 2, 4, 6, 8 ranks, got 3"} and "vllm" not in options.variants
    with pytest.raises(SystemExit):
        bench.BENCHMARK.parse_args(["--world=3", "--variants", "vllm"])
    assert "got vllm: needs 2, 4, 6, 8 ranks, got 3" in capsys.readouterr().err
