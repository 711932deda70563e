// Time of a graph whose kernels lie in the body of a conditional IF node, beside the same kernels without one.
//
//     conditional_node REPEATS NODES...
//
// The condition is set by a kernel of the graph from a flag in device memory, as a captured program would do it.
// Prints a JSON list: for each number of nodes a row each of "plain", "if_run" and "if_skipped" with medians over the
// repeats. host_us: of cudaGraphLaunch on an idle device. launch_sync_us: until the device is done.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                             \
    do {                                                                        \
        if (const cudaError_t error = (call); error != cudaSuccess) {           \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)

constexpr int kColumns = 6;

__global__ void decide(cudaGraphConditionalHandle handle, const int* flag) { cudaGraphSetConditional(handle, *flag); }

// About as much work as an update of few scales.
__global__ void work(const float* scale, float* scale_inv) {
    if (threadIdx.x < kColumns) scale_inv[threadIdx.x] = 1 / scale[threadIdx.x];
}

cudaGraphNode_t add_node(cudaGraph_t graph, const cudaGraphNode_t* after, cudaGraphNodeParams& params) {
    cudaGraphNode_t node;
#if CUDART_VERSION >= 13000
    CHECK(cudaGraphAddNode(&node, graph, after, nullptr, after ? 1 : 0, &params));
#else
    CHECK(cudaGraphAddNode(&node, graph, after, after ? 1 : 0, &params));
#endif
    return node;
}

cudaGraphNode_t add_kernel(cudaGraph_t graph, const cudaGraphNode_t* after, const void* kernel, void** arguments) {
    cudaGraphNodeParams params{};
    params.type = cudaGraphNodeTypeKernel;
    params.kernel.func = const_cast<void*>(kernel);
    params.kernel.gridDim = dim3(1);
    params.kernel.blockDim = dim3(32);
    params.kernel.kernelParams = arguments;
    return add_node(graph, after, params);
}

void add_chain(cudaGraph_t graph, int nodes, float* scale, float* scale_inv) {
    cudaGraphNode_t last;
    for (int i = 0; i < nodes; ++i) {
        void* arguments[] = {&scale, &scale_inv};
        last = add_kernel(graph, i ? &last : nullptr, reinterpret_cast<const void*>(&work), arguments);
    }
}

void add_conditional_chain(cudaGraph_t graph, int nodes, const int* flag, float* scale, float* scale_inv) {
    cudaGraphConditionalHandle handle;
    CHECK(cudaGraphConditionalHandleCreate(&handle, graph, 0, cudaGraphCondAssignDefault));
    void* arguments[] = {&handle, &flag};
    const cudaGraphNode_t decision = add_kernel(graph, nullptr, reinterpret_cast<const void*>(&decide), arguments);
    cudaGraphNodeParams params{};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle;
    params.conditional.type = cudaGraphCondTypeIf;
    params.conditional.size = 1;
    add_node(graph, &decision, params);
    add_chain(params.conditional.phGraph_out[0], nodes, scale, scale_inv);
}

double median(std::vector<double>& values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

void time_graph(const char* variant, cudaGraph_t graph, int nodes, int repeats, bool is_first) {
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    const auto now = [] { return std::chrono::steady_clock::now(); };
    const auto micro = [](auto from, auto to) { return std::chrono::duration<double, std::micro>(to - from).count(); };
    std::vector<double> host, launch_sync;
    for (int i = 0; i < repeats + 10; ++i) {
        const auto start = now();
        CHECK(cudaGraphLaunch(executable, stream));
        const auto launched = now();
        CHECK(cudaStreamSynchronize(stream));
        const auto done = now();
        if (i < 10) continue;
        host.push_back(micro(start, launched));
        launch_sync.push_back(micro(start, done));
    }
    std::printf("%s{\"nodes\": %d, \"variant\": \"%s\", \"launch_sync_us\": %.3f, \"host_us\": %.3f}",
                is_first ? "" : ",\n ", nodes, variant, median(launch_sync), median(host));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaGraphExecDestroy(executable));
}

// Whether the body ran, by what it writes.
void expect(const float* scale_inv, float expected, const char* variant) {
    float found = 0;
    CHECK(cudaMemcpy(&found, scale_inv, sizeof(found), cudaMemcpyDeviceToHost));
    if (found == expected) return;
    std::fprintf(stderr, "%s: expected %g from the body, got %g\n", variant, expected, found);
    std::exit(1);
}

int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: conditional_node REPEATS NODES...\n");
        return 2;
    }
    int* flag = nullptr;
    float *scale = nullptr, *scale_inv = nullptr;
    const float fours[kColumns] = {4, 4, 4, 4, 4, 4};
    CHECK(cudaMalloc(&flag, sizeof(int)));
    CHECK(cudaMalloc(&scale, sizeof(fours)));
    CHECK(cudaMalloc(&scale_inv, sizeof(fours)));
    CHECK(cudaMemcpy(scale, fours, sizeof(fours), cudaMemcpyHostToDevice));
    std::printf("[");
    for (int i = 2; i < argc; ++i) {
        const int nodes = std::atoi(argv[i]);
        for (const char* const variant : {"plain", "if_run", "if_skipped"}) {
            const bool is_plain = variant[0] == 'p', runs = variant[3] == 'r' || is_plain;
            const int value = runs;
            CHECK(cudaMemcpy(flag, &value, sizeof(value), cudaMemcpyHostToDevice));
            CHECK(cudaMemset(scale_inv, 0, sizeof(fours)));
            cudaGraph_t graph;
            CHECK(cudaGraphCreate(&graph, 0));
            if (is_plain) add_chain(graph, nodes, scale, scale_inv);
            if (!is_plain) add_conditional_chain(graph, nodes, flag, scale, scale_inv);
            time_graph(variant, graph, nodes, std::atoi(argv[1]), i == 2 && is_plain);
            expect(scale_inv, runs ? 0.25f : 0.0f, variant);
            CHECK(cudaGraphDestroy(graph));
        }
    }
    std::printf("]\n");
    return 0;
}
