// A captured piece of work that can be run again on the same memory.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace te_graph::graphs {

class Graph {
public:
    virtual ~Graph() = default;
    // Enqueues the captured work on the current stream (CUDA) or runs it (recorder).
    virtual void replay() = 0;
};

// One that was captured, as opposed to put together from others.
class CapturedGraph : public Graph {
public:
    // The `torch.cuda.CUDAGraph` or `te_graph.Recorder`.
    virtual pybind11::object captured() const = 0;
};

// A graph that does what `parts` do one after the other, or null when that cannot be one graph: CUDA graphs that draw
// random numbers get the state of the generator from each launch.
std::shared_ptr<Graph> merge(const std::vector<std::shared_ptr<Graph>>& parts);

// Wraps a `torch.cuda.CUDAGraph` of the current device or a `te_graph.Recorder`. Takes a reference to it.
std::shared_ptr<CapturedGraph> make_graph(const pybind11::object& captured);

// Lets each replay of `backward` draw again what the last one of `forward` drew: sets each generator, which `backward`
// was captured with, to so many numbers after where that began. CUDA only; recordings do so by themselves.
void rewind(const std::shared_ptr<CapturedGraph>& forward, const std::shared_ptr<CapturedGraph>& backward,
            std::vector<std::pair<at::Generator, uint64_t>> generators);

// How many numbers the capture under way has drawn from the default generator of GPU `device`.
uint64_t offset_in_capture(c10::DeviceIndex device);

// Does what torch leaves undone where ending a capture fails: takes `pool` from the allocators' lists of pools that a
// capture uses, and drops the reference to it that the capture took, without which its memory would stay for ever.
void abandon_pool(c10::DeviceIndex device, std::pair<uint64_t, uint64_t> pool);

// Number of nodes of the cudaGraph_t at `address`.
int64_t node_count(int64_t address);

}  // namespace te_graph::graphs
