// Orders the operations of a group one after the other, whatever streams they are called on.
#pragma once

#ifdef TE_GRAPH_CUDA

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace te_graph::collectives {

// Where the last operation and the next one are both eager, or both in one capture, an event orders them. Between graphs,
// and graphs and eager operations, no event can: those who replay must order, and kernels see it when they did not.
class StreamChain {
public:
    StreamChain() = default;
    StreamChain(const StreamChain&) = delete;
    StreamChain& operator=(const StreamChain&) = delete;
    ~StreamChain() {
        for (const Link* link : {&eager_, &captured_}) {
            if (link->event != nullptr) C10_CUDA_CHECK_WARN(cudaEventDestroy(link->event));
        }
    }

    void enter(cudaStream_t stream) {
        Link& link = link_of(stream);
        if (link.has_last && link.last != stream) C10_CUDA_CHECK(cudaStreamWaitEvent(stream, link.event));
    }
    void leave(cudaStream_t stream) {
        Link& link = link_of(stream);
        if (link.event == nullptr) C10_CUDA_CHECK(cudaEventCreateWithFlags(&link.event, cudaEventDisableTiming));
        C10_CUDA_CHECK(cudaEventRecord(link.event, stream));
        link.last = stream;
        link.has_last = true;
    }

private:
    struct Link {
        cudaEvent_t event = nullptr;
        cudaStream_t last = nullptr;
        bool has_last = false;
        unsigned long long capture = 0;
    };

    Link& link_of(cudaStream_t stream) {
        cudaStreamCaptureStatus status;
        unsigned long long capture = 0;
        C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
        if (status == cudaStreamCaptureStatusNone) return eager_;
        if (captured_.capture != capture) captured_ = {captured_.event, nullptr, false, capture};
        return captured_;
    }

    Link eager_, captured_;
};

}  // namespace te_graph::collectives

#endif
