// Process-wide settings that a capture freezes: what kernels a replay runs does not follow them any more.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>

#include <string>

namespace te_graph::graph {

struct Settings {
    bool autocast;
    at::ScalarType autocast_dtype;
    bool deterministic;
    bool deterministic_cudnn;
    bool benchmark_cudnn;
    at::Float32Precision matmul;
    at::Float32Precision convolution;

    static Settings current(c10::DeviceType device);
    // Empty when equal, else which setting differs.
    std::string difference(const Settings& now) const;
};

}  // namespace te_graph::graph
