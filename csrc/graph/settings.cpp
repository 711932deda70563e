#include "graph/settings.h"

#include <ATen/autocast_mode.h>

namespace te_graph::graph {

namespace {

// NONE means that nobody has chosen; the kernels then compute as for IEEE.
at::Float32Precision precision(at::Float32Backend backend, at::Float32Op op) {
    const auto chosen = at::globalContext().float32Precision(backend, op);
    return chosen == at::Float32Precision::NONE ? at::Float32Precision::IEEE : chosen;
}

}  // namespace

Settings Settings::current(c10::DeviceType device) {
    const at::Context& context = at::globalContext();
    const auto backend = device == at::kCUDA ? at::Float32Backend::CUDA : at::Float32Backend::MKLDNN;
    const bool autocast = at::autocast::is_autocast_enabled(device);
    return {.autocast = autocast,
            .autocast_dtype = autocast ? at::autocast::get_autocast_dtype(device) : at::kFloat,
            .deterministic = context.deterministicAlgorithms(),
            .deterministic_cudnn = context.deterministicCuDNN(),
            .benchmark_cudnn = context.benchmarkCuDNN(),
            .matmul = precision(backend, at::Float32Op::MATMUL),
            .convolution = precision(backend, at::Float32Op::CONV)};
}

std::string Settings::difference(const Settings& now) const {
    if (autocast != now.autocast) return now.autocast ? "autocast is now on" : "autocast is now off";
    if (autocast_dtype != now.autocast_dtype) return "the dtype of autocast changed";
    if (deterministic != now.deterministic) return "torch.use_deterministic_algorithms changed";
    if (deterministic_cudnn != now.deterministic_cudnn) return "torch.backends.cudnn.deterministic changed";
    if (benchmark_cudnn != now.benchmark_cudnn) return "torch.backends.cudnn.benchmark changed";
    if (matmul != now.matmul) return "the float32 precision of matrix products (TF32) changed";
    if (convolution != now.convolution) return "the float32 precision of convolutions (TF32) changed";
    return {};
}

}  // namespace te_graph::graph
