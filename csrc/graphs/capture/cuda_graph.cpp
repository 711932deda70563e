#include "graphs/capture/cuda_graph.h"

#ifdef TE_GRAPH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>

#include "graphs/capture/random_state.h"
#include "graphs/modes.h"

namespace te_graph::graphs {
namespace {

// Sees the generators that a graph of torch's draws from, each with how far a replay moves it.
template <typename Graph>
class OpenGraph : Graph {
public:
    // As torch's replay() does before it launches, by one launch for each generator where that takes two. False where
    // this release of torch keeps their states elsewhere; nothing is done then.
    static bool set_generators(Graph& graph, cudaStream_t stream) {
        if constexpr (requires {
                          (graph.*(&OpenGraph::captured_generator_states_)).begin()->first->seed_extragraph_;
                      }) {
            for (const auto& [generator, increment] : graph.*(&OpenGraph::captured_generator_states_)) {
                if (increment == 0) continue;
                const RandomState state{generator->seed_extragraph_.template mutable_data_ptr<int64_t>(),
                                        generator->offset_extragraph_.template mutable_data_ptr<int64_t>()};
                C10_CUDA_CHECK(
                    launch_set_random_state(state, generator->seed_, generator->philox_offset_per_thread_, stream));
                generator->philox_offset_per_thread_ += (increment + 3) / 4 * 4;
            }
            return true;
        }
        return false;
    }
};

}  // namespace

CudaGraph::CudaGraph(const pybind11::object& owner, std::shared_ptr<at::cuda::CUDAGraph> graph)
    : owner_(owner), graph_(std::move(graph)), device_(c10::cuda::current_device()) {}

void CudaGraph::rewind_to(std::shared_ptr<CudaGraph> forward,
                          std::vector<std::pair<at::Generator, uint64_t>> generators) {
    forward->notes_generator_ = true;
    rewound_to_ = std::move(forward);
    rewound_ = std::move(generators);
    draws_ = true;
}

void CudaGraph::replay() {
    for (auto& [generator, offset] : rewound_) {
        const std::scoped_lock lock(generator.mutex());
        generator.set_current_seed(rewound_to_->seed_);
        generator.set_offset(rewound_to_->offset_ + offset);
    }
    if (draws_ && !notes_generator_) {
        launch();
        return;
    }
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(c10::cuda::current_device());
    if (notes_generator_) {
        const std::scoped_lock lock(generator.mutex());
        seed_ = generator.current_seed();
        offset_ = generator.get_offset();
    }
    const uint64_t before = generator.get_offset();
    launch();
    draws_ = generator.get_offset() != before;
}

void CudaGraph::launch() {
    const c10::cuda::CUDAGuard on_device(device_);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const cudaGraphExec_t instantiated = is_stream_capturing() ? nullptr : executable();
    if (instantiated && OpenGraph<at::cuda::CUDAGraph>::set_generators(*graph_, stream)) {
        C10_CUDA_CHECK(cudaGraphLaunch(instantiated, stream));
    } else {
        graph_->replay();  // instantiates it, or says what is wrong
    }
}

// torch raises where it has none.
cudaGraph_t CudaGraph::raw() const {
    try {
        return graph_->raw_cuda_graph();
    } catch (const c10::Error&) {
        return nullptr;
    }
}

cudaGraphExec_t CudaGraph::executable() const {
    try {
        return graph_->raw_cuda_graph_exec();
    } catch (const c10::Error&) {
        return nullptr;
    }
}

MergedCudaGraph::MergedCudaGraph(std::vector<std::shared_ptr<CudaGraph>> parts) {
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(cudaGraphCreate(&graph, 0));
    graph_.reset(graph);
    cudaGraphNode_t last = nullptr;
    for (auto& part : parts) {
        cudaGraphNode_t node = nullptr;
        C10_CUDA_CHECK(cudaGraphAddChildGraphNode(&node, graph, &last, last ? 1 : 0, part->raw()));
        last = node;
        const uint64_t changes = part->changes();
        parts_.push_back({std::move(part), node, changes});
    }
    C10_CUDA_CHECK(cudaGraphInstantiateWithFlags(&executable_, graph, cudaGraphInstantiateFlagUseNodePriority));
}

MergedCudaGraph::~MergedCudaGraph() { C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(executable_)); }

void MergedCudaGraph::replay() {
    for (Part& part : parts_) {
        if (part.changes == part.graph->changes()) continue;
        C10_CUDA_CHECK(cudaGraphExecChildGraphNodeSetParams(executable_, part.node, part.graph->raw()));
        part.changes = part.graph->changes();
    }
    C10_CUDA_CHECK(cudaGraphLaunch(executable_, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace te_graph::graphs
#endif
