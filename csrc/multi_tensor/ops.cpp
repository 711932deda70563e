// Checks and registration of the multi-tensor ops.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "common/check.h"
#include "multi_tensor/accumulate.h"

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace te_graph::multi_tensor {
namespace {

constexpr const char* kAccumulate = "multi_tensor_accumulate_table_";
constexpr int64_t kEntryWords = sizeof(Entry) / sizeof(int64_t);

void check_accumulate(const at::Tensor& table,   // [entries, 4] int64
                      const at::Tensor& chunks)  // [chunks, 2] int32
{
    check_dtype(kAccumulate, "table", table, at::kLong);
    check_dtype(kAccumulate, "chunks", chunks, at::kInt);
    check_table(kAccumulate, "table", table, kEntryWords);
    check_table(kAccumulate, "chunks", chunks, 2);
    check_device(kAccumulate, "chunks", chunks, table.device());
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(table.const_data_ptr()) % alignof(Entry) == 0, kAccumulate,
                      ": expected table aligned to ", alignof(Entry), " bytes, got storage offset ",
                      table.storage_offset());
}

void accumulate_table_cpu(const at::Tensor& table, const at::Tensor& chunks) {
    check_accumulate(table, chunks);
    accumulate_cpu(static_cast<const Entry*>(table.const_data_ptr()),
                   static_cast<const Chunk*>(chunks.const_data_ptr()), chunks.size(0));
}

#ifdef TE_GRAPH_CUDA
void accumulate_table_cuda(const at::Tensor& table, const at::Tensor& chunks) {
    check_accumulate(table, chunks);
    const c10::cuda::CUDAGuard guard(table.device());
    C10_CUDA_CHECK(launch_accumulate(static_cast<const Entry*>(table.const_data_ptr()),
                                     static_cast<const Chunk*>(chunks.const_data_ptr()), chunks.size(0),
                                     c10::cuda::getCurrentCUDAStream()));
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CPU, m) { m.impl("multi_tensor_accumulate_table_", accumulate_table_cpu); }

#ifdef TE_GRAPH_CUDA
TORCH_LIBRARY_IMPL(te_graph, CUDA, m) { m.impl("multi_tensor_accumulate_table_", accumulate_table_cuda); }
#endif

}  // namespace te_graph::multi_tensor
