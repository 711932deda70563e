#include "graphs/callables/copy.h"

#include <cstring>

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace te_graph::graphs {

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

bool lie_in_other_order(const at::Tensor& one, const at::Tensor& other) {
    if (one.strides() == other.strides() || one.numel() == 0) return false;
    const auto is_dense = [](const at::Tensor& tensor) {
        return has_memory(tensor) && tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
    };
    const bool are_dense = is_dense(one) && is_dense(other);
    if (!has_memory(one) || !has_memory(other)) return false;
    for (int64_t dim = 0; dim < one.dim(); ++dim) {
        if (one.size(dim) < 2) continue;
        if (are_dense && one.stride(dim) != other.stride(dim)) return true;
        // With gaps, as in a part of the gradient of a cat: by which dimension comes after which. Where one is expanded
        // its order says nothing.
        for (int64_t next = dim + 1; next < one.dim() && !are_dense; ++next) {
            if (one.size(next) < 2 ||
                one.stride(dim) * one.stride(next) * other.stride(dim) * other.stride(next) == 0) {
                continue;
            }
            if ((one.stride(dim) < one.stride(next)) != (other.stride(dim) < other.stride(next))) return true;
        }
    }
    return false;
}

void fill_with_negative_zeros(const at::Tensor& tensor) {
    tensor.zero_();
    if (!c10::isFloat8Type(tensor.scalar_type())) tensor.neg_();  // nothing adds those, nor negates them
}

}  // namespace te_graph::graphs
