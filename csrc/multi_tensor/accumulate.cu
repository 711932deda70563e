// Grid: blocks of 256 threads, each taking every n-th chunk. Threads access 16 bytes of the wider tensor at a
// time; where an address is not a multiple of 16, single elements.
// Bytes per element: source read + destination written (+ destination read when adding, + source written when zeroed):
// 6 for bf16 += bf16, 10 for fp32 += bf16. The sum of squares costs none.
// Determinism: every element has one writer and one addition; squares are summed in the order of norm.h.
#include "multi_tensor/accumulate.h"

#include "multi_tensor/block_sum.cuh"
#include "multi_tensor/inline_table.cuh"
#include "multi_tensor/scale_factor.h"

namespace te_graph::multi_tensor {
namespace {

constexpr int kMaxUpdates = 128;  // 24 bytes each: 3 KB of the 4 KB that every driver passes as kernel arguments

// What a chunk is to undergo; the same for all threads of a block.
template <typename W>
struct Step {
    bool add;
    bool has_scale;
    W scale;
    bool zero_source;
};

template <typename Source, typename Destination, typename W>
__device__ Destination combine(Source source, Destination destination, const Step<W>& step) {
    if constexpr (std::is_same_v<Source, Destination>) {
        if (!step.add && !step.has_scale) return source;
    }
    W value = static_cast<W>(widen(source));
    if (step.has_scale) {
        if constexpr (std::is_same_v<W, double>) value = __dmul_rn(value, step.scale);
        if constexpr (std::is_same_v<W, float>) value = __fmul_rn(value, step.scale);
    }
    if (step.add) value += static_cast<W>(widen(destination));
    return narrow<Destination>(value);
}

// kLanes: elements behind the last vector, too, belong to the thread that norm.h gives them to. see(k, element) gets
// what was written, k being the number of its lane within the thread.
template <bool kLanes, typename Source, typename Destination, typename W, typename See>
__device__ void accumulate_chunk(Source* __restrict__ source, Destination* __restrict__ destination, int count,
                                 const Step<W>& step, const See& see) {
    // 16 bytes of the wider one.
    constexpr int kCount = std::min(kVector<Source>, kVector<Destination>);
    auto* const from = reinterpret_cast<Vector<Source, kCount>*>(source);
    auto* const to = reinterpret_cast<Vector<Destination, kCount>*>(destination);
    int done = 0;
    if (is_aligned(source, destination)) {
        done = for_each_vector<kCount>(count, [&]<int kBatch>(int first) {
            Vector<Source, kCount> sources[kBatch];
            Vector<Destination, kCount> results[kBatch]{};
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                sources[b] = from[first + b * kThreads];
                if (step.add) results[b] = to[first + b * kThreads];
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
#pragma unroll
                for (int k = 0; k < kCount; ++k) {
                    results[b].values[k] = combine(sources[b].values[k], results[b].values[k], step);
                    see(k, results[b].values[k]);
                }
                to[first + b * kThreads] = results[b];
                if (step.zero_source) from[first + b * kThreads] = {};
            }
        });
    }
    const auto single = [&](int i, int k) {
        const Destination result = combine(source[i], step.add ? destination[i] : Destination{}, step);
        see(k, result);
        destination[i] = result;
        if (step.zero_source) source[i] = Source{};
    };
    if constexpr (kLanes) {
        for (int first = threadIdx.x * kCount; first < count; first += kThreads * kCount) {
            if (first < done) continue;
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
                if (first + k < count) single(first + k, k);
            }
        }
    } else {
        for (int i = done + threadIdx.x; i < count; i += kThreads) single(i, 0);
    }
}

// The type in which a pair is computed.
template <typename Source, typename Destination>
using PairWide =
    std::conditional_t<std::is_same_v<Source, double> || std::is_same_v<Destination, double>, double, float>;

template <typename Source, typename Destination, typename Function>
__device__ void with_pair(const ChunkView& view, const Function& function) {
    function(static_cast<Source*>(const_cast<void*>(view.source)) + view.begin,
             static_cast<Destination*>(view.destination) + view.begin);
}

// Calls function(source, destination) with pointers to the chunk's elements, for the pairs that training uses. Returns
// false for the others (fp16 <-> bf16, fp64 <-> anything else).
template <typename Function>
__device__ bool with_common_pair(const ChunkView& view, const Function& function) {
    const DType source = view.source_dtype, destination = view.destination_dtype;
    if (source == destination) {
        with_type(source, [&]<typename T>() { with_pair<T, T>(view, function); });
    } else if (destination == DType::kFloat32 && source == DType::kBFloat16) {
        with_pair<__nv_bfloat16, float>(view, function);
    } else if (destination == DType::kFloat32 && source == DType::kFloat16) {
        with_pair<__half, float>(view, function);
    } else if (source == DType::kFloat32 && destination == DType::kBFloat16) {
        with_pair<float, __nv_bfloat16>(view, function);
    } else if (source == DType::kFloat32 && destination == DType::kFloat16) {
        with_pair<float, __half>(view, function);
    } else {
        return false;
    }
    return true;
}

// The other pairs, element by element through fp64, which holds all others exactly.
__device__ void accumulate_rare_pair(const ChunkView& view, const Step<double>& step, bool& is_infinite) {
    for (int64_t i = view.begin + threadIdx.x; i < view.begin + view.count; i += kThreads) {
        double value = 0;
        with_type(view.source_dtype, [&]<typename Source>() {
            auto* const place = static_cast<Source*>(const_cast<void*>(view.source)) + i;
            value = widen(*place);
            if (step.zero_source) *place = Source{};
        });
        if (step.has_scale) value = __dmul_rn(value, step.scale);
        with_type(view.destination_dtype, [&]<typename Destination>() {
            Destination& place = static_cast<Destination*>(view.destination)[i];
            if (step.add) value += widen(place);
            place = narrow<Destination>(value);
            is_infinite |= !is_finite(widen(place));
        });
    }
}

// What the gradients of a graph need, and most other calls.
template <typename Table>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_accumulate_kernel(const __grid_constant__ Table table, const Accumulation accumulation) {
    for_each_chunk_of_block<Direction::kForward>(table, [&](const ChunkView& view) {
        const Mode mode = accumulation.has_mode ? accumulation.mode : view.mode;
        if (mode == Mode::kSkip) return;
        const auto plain = [&]<typename Source, typename Destination>(Source* source, Destination* destination) {
            const Step<PairWide<Source, Destination>> step{mode == Mode::kAdd, false, 1, false};
            accumulate_chunk<false>(source, destination, view.count, step, [](int, Destination) {});
        };
        bool is_infinite = false;
        if (!with_common_pair(view, plain)) {
            accumulate_rare_pair(view, {mode == Mode::kAdd, false, 1, false}, is_infinite);
        }
    });
}

__device__ void zero_source_of(const ChunkView& view) {
    with_type(view.source_dtype, [&]<typename T>() {
        T* const elements = static_cast<T*>(const_cast<void*>(view.source)) + view.begin;
        for (int i = threadIdx.x; i < view.count; i += kThreads) elements[i] = T{};
    });
}

// All that an Accumulation can ask for.
template <typename Table>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_accumulate_fused_kernel(const __grid_constant__ Table table, const Accumulation accumulation) {
    if (accumulation.noop != nullptr && *accumulation.noop != 0) return;
    __shared__ BlockPartial block;
    clear(block);
    const double scale = read(accumulation.scale);
    const bool has_scale = accumulation.scale.data != nullptr || scale != 1;
    bool is_infinite = false;
    int turn = 0;
    for_each_chunk_of_block<Direction::kForward>(table, [&](const ChunkView& view) {
        const Mode mode = accumulation.has_mode ? accumulation.mode : view.mode;
        if (mode == Mode::kSkip) {
            if (accumulation.zero_source) zero_source_of(view);
            return;
        }
        const bool is_common = with_common_pair(
            view, [&]<typename Source, typename Destination>(Source* source, Destination* destination) {
                using W = PairWide<Source, Destination>;
                const Step<W> step{mode == Mode::kAdd, has_scale, static_cast<W>(scale), accumulation.zero_source};
                Wide<Destination> lanes[kVector<Destination>] = {};
                accumulate_chunk<true>(source, destination, view.count, step, [&](int k, Destination element) {
                    is_infinite |= !is_finite(widen(element));
                    lanes[k] = join<Norm::kSquare>(lanes[k], term<Norm::kSquare>(element, 2));
                });
                if (accumulation.sum_squares != nullptr) {
                    put_thread_sum<Norm::kSquare>(block, turn, lanes_sum<Norm::kSquare>(lanes));
                }
            });
        if (!is_common) {
            accumulate_rare_pair(view, {mode == Mode::kAdd, has_scale, scale, accumulation.zero_source}, is_infinite);
        }
        if (accumulation.sum_squares == nullptr) return;
        __syncthreads();
        if (threadIdx.x < 32) {
            const bool is_double = view.destination_dtype == DType::kFloat64;
            const double sum = is_supported(view.source_dtype, view.destination_dtype)
                                   ? chunk_sum<Norm::kSquare>(block, turn, is_double)
                                   : NAN;
            if (threadIdx.x == 0) add_to_block<Norm::kSquare>(block, sum);
        }
        turn ^= 1;
    });
    if (accumulation.sum_squares != nullptr) flush<Norm::kSquare>(block, accumulation.sum_squares);
    if (is_infinite && accumulation.found_inf != nullptr) *accumulation.found_inf = 1;
}

struct UpdateBatch {
    EntryUpdate updates[kMaxUpdates];
};

// Grid: one block; thread i applies update i.
__global__ void multi_tensor_update_entries_kernel(TableEntry* table, const __grid_constant__ UpdateBatch batch,
                                                   int count) {
    const int i = threadIdx.x;
    if (i >= count) return;
    TableEntry& entry = table[batch.updates[i].entry];
    if (batch.updates[i].has_source) entry.source = batch.updates[i].source;
    entry.destination = batch.updates[i].destination;
    entry.mode = batch.updates[i].mode;
}

}  // namespace

cudaError_t launch_accumulate(const TensorTable& tensors, const Accumulation& accumulation, cudaStream_t stream) {
    return launch_over<true>(tensors, [&](const auto& table, int64_t chunks, int64_t, bool) {
        if (chunks == 0) return;
        using Table = std::decay_t<decltype(table)>;
        const auto kernel = accumulation.is_plain() ? multi_tensor_accumulate_kernel<Table>
                                                    : multi_tensor_accumulate_fused_kernel<Table>;
        kernel<<<writing_blocks(kernel, chunks), kThreads, 0, stream>>>(table, accumulation);
    });
}

cudaError_t launch_update_entries(TableEntry* table, const EntryUpdate* updates, int64_t count, cudaStream_t stream) {
    for (int64_t first = 0; first < count; first += kMaxUpdates) {
        const int size = static_cast<int>(std::min<int64_t>(kMaxUpdates, count - first));
        UpdateBatch batch{};
        std::copy_n(updates + first, size, batch.updates);
        multi_tensor_update_entries_kernel<<<1, kMaxUpdates, 0, stream>>>(table, batch, size);
        if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace te_graph::multi_tensor
