// All-gather by the simple protocol (protocols.h).
//
// Formula: out = concatenation of all x.
// Grid: blocks of 2 x 256 threads, each with every n-th chunk; one half sends, the other half receives, so that links
// and memory are busy at the same time.
// Bytes per element: read once, sent world - 1 times, written once; outside of a memory pool, received data is read,
// written and cleared as well.
// Determinism: bytes are only moved.
// A block waits for the blocks of peers that have the same chunks, never for one of its own GPU.
#include "collectives/ll128.cuh"

namespace te_graph::collectives {
namespace {

// Half of the threads of a block send, the other half receive.
constexpr int kRoleThreads = 256;                            // of a role
constexpr int kVectors = kChunkBytes / (16 * kRoleThreads);  // of a chunk, per thread
enum class Role : int { kSender, kReceiver };
__device__ Role role_of_block() { return threadIdx.x < kRoleThreads ? Role::kSender : Role::kReceiver; }
__device__ int thread_in_role() { return static_cast<int>(threadIdx.x) % kRoleThreads; }

// Barrier of the threads of a role; whether `value` is true for any of them. Barrier 0 is that of the whole block.
__device__ bool sync_role(bool value = false) {
    const auto barrier = 1 + static_cast<uint32_t>(role_of_block());
    uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 q, %1, 0;\n"
        "barrier.cta.red.or.pred p, %2, %3, q;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(any)
        : "r"(static_cast<uint32_t>(value)), "r"(barrier), "n"(kRoleThreads)
        : "memory");
    return any != 0;
}

using Vectors = Vector[kVectors];

__device__ int64_t vector_offset(int64_t chunk, int i) {
    return chunk * kChunkBytes + (i * kRoleThreads + thread_in_role()) * int64_t{16};
}

// Not inlined: rare, and would cost registers.
__device__ __noinline__ Vector load_odd_vector(const char* address, int64_t left) {
    return {load_some(address, left), load_some(address + 8, left - 8)};
}
__device__ __noinline__ void store_odd_vector(char* address, int64_t left, uint64_t first, uint64_t second) {
    store_some(address, left, first);
    store_some(address + 8, left - 8, second);
}

// A chunk of the `bytes` bytes at `begin`, of any alignment; zero-padded.
__device__ void load_chunk(const char* begin, int64_t bytes, int64_t chunk, Vectors& vectors) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t offset = vector_offset(chunk, i);
        vectors[i] = is_aligned && offset + 16 <= bytes ? *reinterpret_cast<const Vector*>(begin + offset)
                                                        : load_odd_vector(begin + offset, bytes - offset);
    }
}
__device__ void store_chunk(char* begin, int64_t bytes, int64_t chunk, const Vectors& vectors) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t offset = vector_offset(chunk, i);
        if (is_aligned && offset + 16 <= bytes) {
            *reinterpret_cast<Vector*>(begin + offset) = vectors[i];
        } else {
            store_odd_vector(begin + offset, bytes - offset, vectors[i].first, vectors[i].second);
        }
    }
}
// Data written by a peer: bypasses L1, which is not coherent with it.
__device__ Vector load_received(const char* chunks, int64_t chunk, int i) {
    const longlong2 raw = __ldcg(reinterpret_cast<const longlong2*>(chunks + vector_offset(chunk, i)));
    return {static_cast<uint64_t>(raw.x), static_cast<uint64_t>(raw.y)};
}

__device__ uint64_t load_acquire(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// The slots of a sender in the receive buffer of a rank.
class ChunkSlot {
public:
    __device__ ChunkSlot(const Peers& peers, const LaunchState& state, int from, int at) {
        const int slot = from < at ? from : from - 1;
        handshake_ = peers.ll128_slots(at) + state.half(peers.ll128_slot_bytes) + slot * peers.ll128_slot_bytes;
        flags_ = peers.flag_slots(at) + state.half(peers.flag_slot_bytes) + slot * peers.flag_slot_bytes;
        chunks_ = peers.data_slots(at) + state.half(peers.data_slot_bytes) + slot * peers.data_slot_bytes;
    }

    __device__ char* handshake() const { return handshake_; }
    __device__ uint64_t handshake_flag() const {
        return load_relaxed(reinterpret_cast<const uint64_t*>(handshake_ + kLineData));
    }
    __device__ uint64_t* flag(int64_t chunk) const { return reinterpret_cast<uint64_t*>(flags_) + chunk; }
    __device__ char* chunks() const { return chunks_; }

private:
    char *handshake_, *flags_, *chunks_;
};

class SimpleAllGather {
public:
    __device__ SimpleAllGather(const Peers& peers, const LaunchArgs& args, LaunchState& state)
        : peers_(peers), args_(args), state_(state), is_failed_(state.failed()) {}

    // Announces where the output is.
    __device__ void send_handshakes() {
        if (blockIdx.x != 0 || threadIdx.x >= 8 || is_failed_) return;
        const Fragment fragment{static_cast<uint64_t>(args_.pool_offset), 0};
        for_each_peer([&](int p) { send_fragment(lane_address(slot_to(p).handshake()), fragment, state_.flag()); });
    }

    // Receives where the outputs of the peers are. Called by all sender threads.
    __device__ void await_handshakes(int64_t* offsets /* [kMaxRanks], shared */) {
        for (int p = thread_in_role() / 32; p < peers_.world; p += kRoleThreads / 32) {
            if (p == peers_.rank || is_failed_) continue;
            while (true) {
                const Fragment fragment = receive_fragment(lane_address(slot_from(p).handshake()));
                const bool is_missing = lane_has_flag() && fragment.second != state_.flag();
                if (threadIdx.x % 32 == 0) offsets[p] = static_cast<int64_t>(fragment.first);
                if (!__any_sync(~0u, is_missing)) break;
                if (!state_.keep_waiting(is_missing, fragment.second, p)) {
                    is_failed_ = true;
                    break;
                }
            }
        }
        state_.restart_timeout();
        is_failed_ = sync_role(is_failed_);
        offsets_ = offsets;
    }

    // Loads the chunk that is sent next.
    __device__ void prefetch(int64_t chunk) { load_chunk(args_.input.begin(0), args_.input.size(0), chunk, ready_); }

    // Stores a chunk to this rank's own output and to all peers, and loads `next` meanwhile.
    __device__ void send(int64_t chunk, int64_t next) {
        if (is_failed_) fill_nan(ready_);
        store_chunk(args_.out.begin(peers_.rank), args_.out.size(peers_.rank), chunk, ready_);
        if (is_failed_) return;
        for_each_peer([&](int p) {
            if (offsets_[p] >= 0) {
                char* const out = peers_.pool[p] + offsets_[p] + peers_.rank * args_.out.stride;
                store_chunk(out, args_.out.size(peers_.rank), chunk, ready_);
            } else {
                store_aligned(slot_to(p).chunks(), chunk, ready_);
            }
        });
        prefetch(next);
        sync_role();
        if (thread_in_role() == 0) set_flag(chunk);
    }

    // Waits for a chunk of all peers, and copies it unless it was written to the output directly.
    __device__ void receive(int64_t chunk) {
        const bool is_received = await(chunk);
        if (is_received && args_.pool_offset >= 0) return;
        for_each_peer([&](int p) {
            Vectors vectors;
            if (is_received) {
#pragma unroll
                for (int i = 0; i < kVectors; ++i) vectors[i] = load_received(slot_from(p).chunks(), chunk, i);
            } else {
                fill_nan(vectors);
            }
            store_chunk(args_.out.begin(p), args_.out.size(p), chunk, vectors);
            if (is_received) clear(slot_from(p).chunks(), chunk);
        });
    }

private:
    __device__ ChunkSlot slot_to(int peer) const { return {peers_, state_, peers_.rank, peer}; }
    __device__ ChunkSlot slot_from(int peer) const { return {peers_, state_, peer, peers_.rank}; }

    // Each rank starts with its successor, so that the load is spread over the links.
    template <typename Function>
    __device__ void for_each_peer(const Function& function) const {
        for (int i = 1; i < peers_.world; ++i) {
            function(peers_.rank + i < peers_.world ? peers_.rank + i : peers_.rank + i - peers_.world);
        }
    }

    // NaN in every float format.
    __device__ static void fill_nan(Vectors& vectors) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) vectors[i] = {~0ull, ~0ull};
    }
    __device__ static void clear(char* chunks, int64_t chunk) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            *reinterpret_cast<Vector*>(chunks + vector_offset(chunk, i)) = {kSentinel, kSentinel};
        }
    }

    __device__ static void store_aligned(char* chunks, int64_t chunk, const Vectors& vectors) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            *reinterpret_cast<Vector*>(chunks + vector_offset(chunk, i)) = vectors[i];
        }
    }

    // Signals a chunk, which all sender threads wrote before their barrier.
    __device__ void set_flag(int64_t chunk) const {
        __threadfence_system();
        for_each_peer([&](int p) { store_relaxed(slot_to(p).flag(chunk), state_.flag()); });
    }

    // Waits for a chunk of all peers, one lane of the first warp for each; false if the operation failed.
    __device__ bool await(int64_t chunk) {
        if (thread_in_role() < 32 && !is_failed_) {
            const int peer = thread_in_role();
            const bool is_awaited = peer < peers_.world && peer != peers_.rank;
            const uint64_t* const address = is_awaited ? slot_from(peer).flag(chunk) : nullptr;
            while (true) {
                uint64_t seen = is_awaited ? load_acquire(address) : state_.flag();
                const bool is_missing = seen != state_.flag();
                if (!__any_sync(~0u, is_missing)) break;
                // A peer that runs another operation sets no flag here.
                if (is_missing) seen = slot_from(peer).handshake_flag();
                // A peer that has arrived may itself wait for another one: peers that have not are reported first.
                const bool is_absent = is_missing && seen != state_.flag();
                const bool is_to_blame = __any_sync(~0u, is_absent) ? is_absent : is_missing;
                if (!state_.keep_waiting(is_to_blame, seen, peer)) {
                    is_failed_ = true;
                    break;
                }
            }
            state_.restart_timeout();
        }
        is_failed_ = sync_role(is_failed_);
        return !is_failed_;
    }

    const Peers& peers_;
    const LaunchArgs& args_;
    LaunchState& state_;
    const int64_t* offsets_ = nullptr;
    Vectors ready_;
    bool is_failed_;
};

__global__ void __launch_bounds__(2 * kRoleThreads, 1)
    all_gather_simple_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    __shared__ int64_t offsets[kMaxRanks];
    Arrival arrival(peers, args.launch);
    await_predecessor(arrival.prepared());
    arrival.begin();
    LaunchState state(peers, args.fingerprint, args.launch, arrival);
    SimpleAllGather chunks(peers, args, state);
    chunks.send_handshakes();
    if (role_of_block() == Role::kSender) {
        chunks.prefetch(blockIdx.x);
        chunks.await_handshakes(offsets);
        for (int64_t chunk = blockIdx.x; chunk < args.count; chunk += gridDim.x) chunks.send(chunk, chunk + gridDim.x);
    } else {
        for (int64_t chunk = blockIdx.x; chunk < args.count; chunk += gridDim.x) chunks.receive(chunk);
    }
    state.end();
}

}  // namespace

cudaError_t launch_simple(const Peers& peers, const LaunchArgs& args, cudaStream_t stream) {
    const EarlyLaunch launch(args, 2 * kRoleThreads, stream);
    return cudaLaunchKernelEx(&launch.config, all_gather_simple_kernel, args, peers);
}

}  // namespace te_graph::collectives
