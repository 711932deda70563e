// Grid: blocks of 256 threads, each taking every n-th chunk. A block sums a chunk in the order that norm.h fixes, with
// 8 consecutive elements per thread and round, and adds the sum to the exact sum that it keeps in shared memory; at
// its end it adds that to the partial in global memory, some three atomics. The block that comes last writes the norm
// and clears the partial for the next launch.
// Bytes per element: one read.
// Determinism: the order within a chunk is fixed, all else is integer addition, so the bits depend on the elements
// alone.
#include "multi_tensor/block_sum.cuh"
#include "multi_tensor/inline_table.cuh"
#include "multi_tensor/norm.h"

namespace te_graph::multi_tensor {
namespace {

// What this thread's lanes of a chunk come to.
template <Norm kNorm, typename T>
__device__ Wide<T> thread_sum(const T* __restrict__ elements, int count, Wide<T> p) {
    constexpr int kRound = kThreads * kVector<T>;
    Wide<T> lanes[kVector<T>] = {};
    if (count == kChunkElements && is_aligned(elements)) {
#pragma unroll
        for (int round = 0; round < kChunkElements / kRound; ++round) {
            const auto vector = reinterpret_cast<const Vector<T>*>(elements)[round * kThreads + threadIdx.x];
#pragma unroll
            for (int k = 0; k < kVector<T>; ++k) lanes[k] = join<kNorm>(lanes[k], term<kNorm>(vector.values[k], p));
        }
    } else {
        for (int first = threadIdx.x * kVector<T>; first < count; first += kRound) {
#pragma unroll
            for (int k = 0; k < kVector<T>; ++k) {
                if (first + k < count) lanes[k] = join<kNorm>(lanes[k], term<kNorm>(elements[first + k], p));
            }
        }
    }
    return lanes_sum<kNorm>(lanes);
}

struct NormArguments {
    double p;
    uint64_t* partial;  // [kPartialWords], or [entries, kPartialWords] if per_entry
    NormResult result;
    bool per_entry;
    bool is_last;
};

__device__ void write_norm(double value, NormResult result, int64_t index) {
    if (result.is_double) {
        static_cast<double*>(result.out)[index] = value;
    } else {
        static_cast<float*>(result.out)[index] = static_cast<float>(value);
    }
}

template <Norm kNorm, typename Table>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_norm_kernel(const __grid_constant__ Table table, int64_t first_entry, NormArguments arguments) {
    __shared__ BlockPartial block;
    __shared__ bool is_last_block;
    clear(block);
    int turn = 0;
    for_each_chunk_of_block<Direction::kForward>(table, [&](const ChunkView& view) {
        with_type(view.destination_dtype, [&]<typename T>() {
            const auto* const elements = static_cast<const T*>(view.destination) + view.begin;
            const auto p = static_cast<Wide<T>>(arguments.p);
            put_thread_sum<kNorm>(block, turn, thread_sum<kNorm>(elements, view.count, p));
        });
        // One barrier per chunk: until all are here again, the other half of `sums` is written.
        __syncthreads();
        if (threadIdx.x < 32) {
            const double sum = chunk_sum<kNorm>(block, turn, view.destination_dtype == DType::kFloat64);
            if (threadIdx.x == 0 && arguments.per_entry) {
                add_to_global<kNorm>(arguments.partial + (first_entry + view.entry) * kPartialWords, sum);
            } else if (threadIdx.x == 0) {
                add_to_block<kNorm>(block, sum);
            }
        }
        turn ^= 1;
    });
    if (arguments.per_entry) return;

    flush<kNorm>(block, arguments.partial);
    if (arguments.result.out == nullptr || !arguments.is_last) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        auto* const ticket = reinterpret_cast<unsigned long long*>(arguments.partial + kTicket);
        is_last_block = atomicAdd(ticket, 1ull) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last_block) return;
    __threadfence();
    for (int i = threadIdx.x; i < kPartialWords; i += kThreads) {
        block.words[i] = __ldcg(arguments.partial + i);
        arguments.partial[i] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) write_norm(norm_value(block.words, kNorm, arguments.p), arguments.result, 0);
}

// Grid: one block per partial.
__global__ void multi_tensor_finish_norm_kernel(const uint64_t* partials, Norm norm, double p, NormResult result) {
    __shared__ uint64_t words[kPartialWords];
    const uint64_t* const partial = partials + int64_t{blockIdx.x} * kPartialWords;
    for (int i = threadIdx.x; i < kPartialWords; i += blockDim.x) words[i] = partial[i];
    __syncthreads();
    if (threadIdx.x == 0) write_norm(norm_value(words, norm, p), result, blockIdx.x);
}

// Calls function.operator()<kNorm>().
template <typename Function>
cudaError_t with_norm(Norm norm, const Function& function) {
    switch (norm) {
        case Norm::kMaximum:
            return function.template operator()<Norm::kMaximum>();
        case Norm::kCount:
            return function.template operator()<Norm::kCount>();
        case Norm::kAbsolute:
            return function.template operator()<Norm::kAbsolute>();
        case Norm::kSquare:
            return function.template operator()<Norm::kSquare>();
        case Norm::kPower:
            return function.template operator()<Norm::kPower>();
    }
    return cudaErrorInvalidValue;
}

cudaError_t finish(const uint64_t* partials, int64_t count, double p, NormResult result, cudaStream_t stream) {
    multi_tensor_finish_norm_kernel<<<static_cast<unsigned>(count), 96, 0, stream>>>(partials, norm_of(p), p, result);
    return cudaGetLastError();
}

}  // namespace

cudaError_t launch_clear(uint64_t* partial, cudaStream_t stream) {
    return cudaMemsetAsync(partial, 0, kPartialWords * sizeof(uint64_t), stream);
}

cudaError_t launch_norm(const TensorTable& tensors, double p, uint64_t* partial, NormResult result, cudaStream_t stream,
                        bool per_entry) {
    return with_norm(norm_of(p), [&]<Norm kNorm>() {
        return launch_over<false>(tensors, [&](const auto& table, int64_t chunks, int64_t first_entry, bool is_last) {
            const auto kernel = multi_tensor_norm_kernel<kNorm, std::decay_t<decltype(table)>>;
            // A list without elements has a norm, too.
            const auto blocks = reading_blocks(kernel, std::max<int64_t>(1, chunks));
            const NormArguments arguments{p, partial, result, per_entry, is_last};
            kernel<<<blocks, kThreads, 0, stream>>>(table, first_entry, arguments);
        });
    });
}

cudaError_t launch_norms(const TensorTable& tensors, double p, uint64_t* partials, NormResult result,
                         cudaStream_t stream) {
    if (tensors.count == 0) return cudaSuccess;
    const size_t bytes = static_cast<size_t>(tensors.count) * kPartialWords * sizeof(uint64_t);
    if (const cudaError_t error = cudaMemsetAsync(partials, 0, bytes, stream); error != cudaSuccess) return error;
    if (const cudaError_t error = launch_norm(tensors, p, partials, result, stream, true); error != cudaSuccess) {
        return error;
    }
    return finish(partials, tensors.count, p, result, stream);
}

cudaError_t launch_finish_norm(const uint64_t* partial, double p, NormResult result, cudaStream_t stream) {
    return finish(partial, 1, p, result, stream);
}

}  // namespace te_graph::multi_tensor
