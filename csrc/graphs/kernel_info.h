// What te_graph tells of a kernel of its own, so that captured launches of it can be found and changed. No Torch.
//
//     const graphs::KernelInfo& scale_kernel_info() {
//         static const graphs::KernelInfo info{
//             .name = "scale",
//             .functions = {&scale_kernel<float>, &scale_kernel<double>},
//             .arguments = {{"is_first", 3, graphs::KernelInfo::Argument::kBool}},
//         };
//         return info;
//     }
#pragma once

#include <cstddef>
#include <vector>

namespace te_graph::graphs {

// One instantiation: the host symbol that its launches name, and the sizes of its parameters in bytes.
struct KernelFunction {
    template <typename... Parameters>
    KernelFunction(void (*kernel)(Parameters...))
        : symbol(reinterpret_cast<const void*>(kernel)), parameter_sizes{sizeof(Parameters)...} {}

    const void* symbol;
    std::vector<size_t> parameter_sizes;
};

struct KernelInfo {
    // A scalar that may be set between launches: parameter `index` of each function.
    struct Argument {
        enum Type { kBool, kInt32, kFloat32 };

        const char* name;
        size_t index;
        Type type;
    };

    const char* name;
    std::vector<KernelFunction> functions;
    std::vector<Argument> arguments;
};

}  // namespace te_graph::graphs
