#include "graph/copy.h"

#include <cstring>

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace te_graph::graph {

void copy_into(const at::Tensor& destination, const at::Tensor& source) {
    const bool same_layout = source.strides() == destination.strides() &&
                             destination.unsafeGetTensorImpl()->is_non_overlapping_and_dense() && !source.is_conj() &&
                             !source.is_neg() && has_memory(source);
    if (!same_layout) {
        destination.copy_(source);
        return;
    }
    if (destination.numel() == 0) return;
    void* const to = destination.mutable_data_ptr();
    const void* const from = source.const_data_ptr();
    if (to == from) return;
    if (destination.is_cpu()) {
        std::memcpy(to, from, destination.nbytes());
    } else {
#ifdef TE_GRAPH_CUDA
        C10_CUDA_CHECK(cudaMemcpyAsync(to, from, destination.nbytes(), cudaMemcpyDeviceToDevice,
                                       c10::cuda::getCurrentCUDAStream(destination.get_device())));
#endif
    }
}

void fill_with_no_gradient(const at::Tensor& tensor) { tensor.zero_().neg_(); }

}  // namespace te_graph::graph
