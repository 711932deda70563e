#include "graphs/capture/nodes.h"

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstring>

namespace te_graph::graphs {
namespace {

// A launch as a node has it, with copies of its arguments: what the runtime lends is gone once the node is changed.
class Launch {
public:
    Launch(cudaGraphNode_t node, const KernelFunction& function) {
        C10_CUDA_CHECK(cudaGraphKernelNodeGetParams(node, &params_));
        for (size_t i = 0; i < function.parameter_sizes.size(); ++i) {
            const auto* const bytes = static_cast<const char*>(params_.kernelParams[i]);
            values_.emplace_back(bytes, bytes + function.parameter_sizes[i]);
        }
    }

    std::vector<char>& value(size_t parameter) { return values_[parameter]; }

    // Valid until the next call, or until a value is changed.
    const cudaKernelNodeParams* params() {
        pointers_.clear();
        for (auto& value : values_) pointers_.push_back(value.data());
        params_.kernelParams = pointers_.data();
        params_.extra = nullptr;
        return &params_;
    }

private:
    cudaKernelNodeParams params_{};
    std::vector<std::vector<char>> values_;
    std::vector<void*> pointers_;
};

std::vector<char> bytes_of(const ArgumentValue& scalar) {
    return std::visit(
        [](const auto& value) {
            const auto* const bytes = reinterpret_cast<const char*>(&value);
            return std::vector<char>(bytes, bytes + sizeof(value));
        },
        scalar);
}

template <typename T>
T scalar_from(const std::vector<char>& bytes) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
}

struct Found {
    cudaGraphNode_t node;
    cudaGraphNode_t child;  // of the outermost graph, or null
    const KernelFunction* function;
};

void collect(cudaGraph_t graph, cudaGraphNode_t child, const KernelInfo& kernel, std::vector<Found>& found) {
    size_t count = 0;
    C10_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    C10_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
    for (const cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type{};
        C10_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
        if (type == cudaGraphNodeTypeGraph) {
            cudaGraph_t inner = nullptr;
            C10_CUDA_CHECK(cudaGraphChildGraphNodeGetGraph(node, &inner));
            collect(inner, child ? child : node, kernel, found);
        }
        if (type != cudaGraphNodeTypeKernel) continue;
        cudaKernelNodeParams params{};
        if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess) {
            // The runtime knows only kernels that were launched through it: not those of Triton, or of cuBLAS.
            (void)cudaGetLastError();
            continue;
        }
        const auto is_launched = [&](const KernelFunction& function) { return function.symbol == params.func; };
        const auto function = std::find_if(kernel.functions.begin(), kernel.functions.end(), is_launched);
        if (function != kernel.functions.end()) found.push_back({node, child, &*function});
    }
}

}  // namespace

KernelNode::KernelNode(std::shared_ptr<CudaGraph> graph, const KernelInfo* kernel, const KernelFunction* function,
                       cudaGraphNode_t node, cudaGraphNode_t child)
    : graph_(std::move(graph)), raw_(graph_->raw()), kernel_(kernel), function_(function), node_(node), child_(child) {}

std::vector<KernelNode> KernelNode::find(const std::shared_ptr<CudaGraph>& graph, const KernelInfo& kernel) {
    const c10::cuda::CUDAGuard on_device(graph->device());
    TORCH_CHECK(graph->raw(),
                "KernelNode.find: expected a captured graph whose nodes torch keeps (of te_graph.create_graph(), or a "
                "torch.cuda.CUDAGraph(keep_graph=True)), got one that was not captured or whose nodes are gone");
    std::vector<Found> found;
    collect(graph->raw(), nullptr, kernel, found);
    std::vector<KernelNode> nodes;
    for (const Found& one : found) nodes.push_back(KernelNode(graph, &kernel, one.function, one.node, one.child));
    return nodes;
}

ArgumentValue KernelNode::get(const std::string& name) const {
    check_graph();
    const c10::cuda::CUDAGuard on_device(graph_->device());
    const KernelInfo::Argument& wanted = argument(name);
    const std::vector<char> value = Launch(node_, *function_).value(wanted.index);
    if (wanted.type == KernelInfo::Argument::kBool) return scalar_from<bool>(value);
    if (wanted.type == KernelInfo::Argument::kInt32) return scalar_from<int32_t>(value);
    return scalar_from<float>(value);
}

void KernelNode::set(const std::map<std::string, ArgumentValue>& values) {
    check_graph();
    const c10::cuda::CUDAGuard on_device(graph_->device());
    Launch before(node_, *function_);
    Launch after = before;
    bool is_change = false;
    for (const auto& [name, scalar] : values) {
        const KernelInfo::Argument& wanted = argument(name);
        std::vector<char>& value = after.value(wanted.index);
        std::vector<char> bytes = bytes_of(scalar);
        TORCH_INTERNAL_ASSERT(scalar.index() == wanted.type && bytes.size() == value.size(), kernel_->name, ": ", name,
                              " got a value of another type");
        is_change = is_change || bytes != value;
        value = std::move(bytes);
    }
    if (!is_change) return;

    // The graph keeps what its executable has: to be read, for child graphs, and for whatever else is made from it.
    C10_CUDA_CHECK(cudaGraphKernelNodeSetParams(node_, after.params()));
    if (const cudaGraphExec_t executable = graph_->executable()) {
        cudaGraph_t inner = nullptr;
        if (child_) C10_CUDA_CHECK(cudaGraphChildGraphNodeGetGraph(child_, &inner));
        const cudaError_t status = child_ ? cudaGraphExecChildGraphNodeSetParams(executable, child_, inner)
                                          : cudaGraphExecKernelNodeSetParams(executable, node_, after.params());
        if (status != cudaSuccess) C10_CUDA_CHECK_WARN(cudaGraphKernelNodeSetParams(node_, before.params()));
        C10_CUDA_CHECK(status);
    }
    graph_->note_change();
}

const KernelInfo::Argument& KernelNode::argument(const std::string& name) const {
    const auto is_named = [&](const KernelInfo::Argument& argument) { return argument.name == name; };
    const auto found = std::find_if(kernel_->arguments.begin(), kernel_->arguments.end(), is_named);
    TORCH_INTERNAL_ASSERT(found != kernel_->arguments.end(), kernel_->name, " has no argument ", name, " to be set");
    return *found;
}

void KernelNode::check_graph() const {
    TORCH_CHECK(graph_->raw() == raw_, "KernelNode: expected the graph that the node was found in, got one that was ",
                "reset since: find the node again");
}

}  // namespace te_graph::graphs
#endif
