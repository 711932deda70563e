#include "graphs/modes.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <string>

#include "common/no_derivative.h"

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/device_lazy_init.h>
#endif

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

thread_local int sessions = 0;

}  // namespace

void enter_session() { ++sessions; }
void leave_session() { --sessions; }
bool in_session() { return sessions > 0; }

#ifdef TE_GRAPH_CUDA

bool is_stream_capturing(std::optional<at::Device> device) {
    if (device && !device->is_cuda()) return false;
    if (!c10::cuda::CUDACachingAllocator::get()->initialized() || torch::utils::is_device_in_bad_fork(at::kCUDA)) {
        return false;
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const auto stream = c10::cuda::getCurrentCUDAStream(device ? device->index() : c10::DeviceIndex{-1});
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

#else

bool is_stream_capturing(std::optional<at::Device>) { return false; }

#endif

const char* observing_mode() {
    if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return "called under a TorchDispatchMode";
    if (c10::impl::tls_is_dispatch_key_included(at::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
        return "called under a transform of torch.func";
    }
    if (torch::jit::tracer::isTracing()) return "called while torch.jit.trace traces";
    return nullptr;
}

SavedTensorHooks saved_tensor_hooks() {
    const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
    if (hooks.empty()) return SavedTensorHooks::kNone;
    const py::handle pack = hooks.top().first.ptr(getPyInterpreter());
    if (!py::getattr(pack, "__module__", py::none()).equal(py::str("torch.utils.checkpoint"))) {
        return SavedTensorHooks::kOther;
    }
    const std::string name = py::str(py::getattr(pack, "__qualname__", py::str()));
    return name.rfind("_recomputation", 0) == 0 ? SavedTensorHooks::kRecomputation : SavedTensorHooks::kCheckpoint;
}

std::vector<py::object> saved_tensor_pack_hooks() {
    std::vector<py::object> hooks;
    auto stack = at::SavedTensorDefaultHooks::get_tls_state().stack;
    for (; !stack.empty(); stack.pop()) {
        hooks.push_back(py::reinterpret_borrow<py::object>(stack.top().first.ptr(getPyInterpreter())));
    }
    std::reverse(hooks.begin(), hooks.end());
    return hooks;
}

bool has_saved_tensor_hooks() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

bool looks_for_nan() {
    return torch::autograd::AnomalyMode::is_enabled() && torch::autograd::AnomalyMode::should_check_nan();
}

bool is_observed() {
    return in_session() || observing_mode() || saved_tensor_hooks() == SavedTensorHooks::kOther || is_forward_mode() ||
           is_stream_capturing();
}

}  // namespace te_graph::graphs
