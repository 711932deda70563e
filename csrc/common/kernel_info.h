// What te_graph registers of a kernel of its own, so that captured launches of it can be found and changed: one table
// for CUDA graphs, the recorder and Python. No Torch.
//
//     const KernelRegistration scale_kernel({
//         .name = "scale",
//         .op = "te_graph.scale_",
//         .functions = {&scale_kernel<float>, &scale_kernel<double>},
//         .arguments = {{"is_first", 3, KernelInfo::Argument::kBool}},
//     });
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace te_graph {

// One instantiation: the host symbol that its launches name, and the sizes of its parameters in bytes.
struct KernelFunction {
    template <typename... Parameters>
    KernelFunction(void (*kernel)(Parameters...))
        : symbol(reinterpret_cast<const void*>(kernel)), parameter_sizes{sizeof(Parameters)...} {}

    const void* symbol;
    std::vector<size_t> parameter_sizes;
};

struct KernelInfo {
    // A scalar that may be set between launches: parameter `index` of each function, and of that name in the op's
    // schema.
    struct Argument {
        enum Type { kBool, kInt32, kFloat32 };

        std::string name;
        size_t index;
        Type type;
    };

    std::string name;
    std::string op;                         // whose calls launch it, with its overload
    std::vector<KernelFunction> functions;  // none where te_graph is built without CUDA
    std::vector<Argument> arguments;
};

// Every kernel whose launches can be found. Areas register theirs when the library is loaded.
inline std::vector<KernelInfo>& kernels() {
    static std::vector<KernelInfo> all;
    return all;
}

struct KernelRegistration {
    explicit KernelRegistration(KernelInfo info) { kernels().push_back(std::move(info)); }
};

}  // namespace te_graph
