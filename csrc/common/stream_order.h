// Orders operations on the same memory one after the other, whatever streams they are called on.
#pragma once

#ifdef TE_GRAPH_CUDA

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <optional>

namespace te_graph {

// Where the last operation and the next one are both eager, or both in one capture, an event orders them. Between
// graphs, and between graphs and eager operations, no event can: replays are for the caller to order.
class StreamOrder {
public:
    StreamOrder() = default;
    StreamOrder(const StreamOrder&) = delete;
    StreamOrder& operator=(const StreamOrder&) = delete;
    ~StreamOrder() {
        for (const Link* link : {&eager_, &captured_}) {
            if (link->event != nullptr) C10_CUDA_CHECK_WARN(cudaEventDestroy(link->event));
        }
    }

    // Runs operation() on a stream, behind the last one.
    template <typename Function>
    void run(c10::cuda::CUDAStream stream, const Function& operation) {
        Link& link = link_of(stream);
        if (link.last && *link.last != stream) {
            // The last stream's work alone has to be waited for, so an event may be recorded this late. Where that
            // stream is being captured by now, earlier work has no event.
            if (!link.is_recorded && !capture_of(*link.last)) record(link, *link.last);
            if (link.is_recorded) C10_CUDA_CHECK(cudaStreamWaitEvent(stream, link.event));
        }
        // Also where the operation fails halfway.
        link.last = stream;
        link.is_recorded = false;
        operation();
        // An event costs as much as a launch, and most memory is used on one stream. External streams may be gone when
        // the next operation comes, and a capture may have joined its streams.
        if (&link == &captured_ || !is_of_torch(stream)) record(link, stream);
    }

private:
    struct Link {
        cudaEvent_t event = nullptr;
        std::optional<c10::cuda::CUDAStream> last;
        bool is_recorded = false;  // after the last operation
        unsigned long long capture = 0;
    };

    // Torch's own streams live as long as the process: the default one, and those whose numbers are odd.
    static bool is_of_torch(const c10::cuda::CUDAStream& stream) { return stream.id() == 0 || stream.id() % 2 != 0; }
    // The capture that a stream is part of, if any.
    static std::optional<unsigned long long> capture_of(cudaStream_t stream) {
        cudaStreamCaptureStatus status;
        unsigned long long capture = 0;
        C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
        if (status == cudaStreamCaptureStatusNone) return {};
        return capture;
    }
    static void record(Link& link, cudaStream_t stream) {
        if (link.event == nullptr) C10_CUDA_CHECK(cudaEventCreateWithFlags(&link.event, cudaEventDisableTiming));
        C10_CUDA_CHECK(cudaEventRecord(link.event, stream));
        link.is_recorded = true;
    }

    Link& link_of(cudaStream_t stream) {
        // The default stream cannot be captured, and asking takes time.
        if (stream == nullptr) return eager_;
        const auto capture = capture_of(stream);
        if (!capture) return eager_;
        if (captured_.capture != *capture) captured_ = {captured_.event, {}, false, *capture};
        return captured_;
    }

    Link eager_, captured_;
};

}  // namespace te_graph

#endif
