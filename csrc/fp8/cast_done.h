// The end of a launch that casts weights, for layers that are called on other streams.
#pragma once

#include <c10/core/Event.h>

#include "common/current_stream.h"

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace te_graph::fp8 {

class CastDone {
public:
    // Of what has been launched on the current stream of `device`.
    explicit CastDone(c10::Device device) : event_(device.type()), stream_(current_stream(device)) {
        if (!device.is_cpu()) event_.record(stream_);
    }

    // The current stream waits, if it is another one. Not one that is captured: then each replay does so before.
    void wait() const {
        if (stream_.device().is_cpu()) return;
        const c10::Stream now = current_stream(stream_.device());
        if (now == stream_) return;
#ifdef TE_GRAPH_CUDA
        if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return;
#endif
        event_.block(now);
    }

private:
    c10::Event event_;
    const c10::Stream stream_;
};

}  // namespace te_graph::fp8
