// The state of a launch on the device: how a kernel joins and leaves an operation, and how waiting for a peer ends when
// the peer does not respond.
#pragma once

#include "collectives/peers.h"

namespace te_graph::collectives {

// Programmatic dependent launch: a kernel is launched before its predecessor on the stream has ended, which hides the
// launch latency (0.4 us of the 2.7 that the smallest collectives took without).

// Early if args.starts_early. The kernel calls await_predecessor() before it accesses memory.
struct EarlyLaunch {
    EarlyLaunch(const LaunchArgs& args, int threads, cudaStream_t stream) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.gridDim = dim3(args.blocks);
        config.blockDim = dim3(threads);
        config.stream = stream;
        config.attrs = &attribute;
        config.numAttrs = args.starts_early ? 1 : 0;
    }
    EarlyLaunch(const EarlyLaunch&) = delete;
    EarlyLaunch& operator=(const EarlyLaunch&) = delete;

    cudaLaunchAttribute attribute{};
    cudaLaunchConfig_t config{};  // refers to the attribute
};

// Waits until the predecessor has ended and its writes are visible. `prepared`: the or of all values to be computed
// before the wait, never 0; without this dependency the assembler would schedule the wait first.
__device__ __forceinline__ void await_predecessor(uint64_t prepared) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u64 p, %0, 0;\n"
        "@p griddepcontrol.wait;\n"
        "}\n" ::"l"(prepared)
        : "memory");
#endif
}

// Once all blocks have called it or have exited, blocks of the successor may be scheduled on free multiprocessors.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline uint64_t now_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

__device__ inline uint64_t load_relaxed(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
__device__ inline void store_relaxed(uint64_t* address, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline uint64_t add_relaxed(uint64_t* address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
}

// Not in one store: a reader tells by the flag (fits()) whether all parts have arrived.
__device__ inline void store_relaxed(Extents* address, const Extents& extents) {
    constexpr int kParts = sizeof(Extents) / sizeof(uint64_t);
    for (int i = 0; i < kParts; ++i) {
        store_relaxed(reinterpret_cast<uint64_t*>(address) + i, reinterpret_cast<const uint64_t*>(&extents)[i]);
    }
}

// Aborts the group: the first thread to claim the record writes it, and all peers are notified whatever the failure,
// since a mismatch may be detected on another rank.
__device__ inline __noinline__ void abort_group(const Peers& peers, Failure failure, int peer, uint64_t expected,
                                                uint64_t seen) {
    if (atomicExch(&peers.control->is_claimed, 1) != 0) return;
    *const_cast<volatile float*>(&peers.control->failed) = 1.0f;
    volatile FailureRecord& record = *peers.control->record;
    record.failure = failure;
    record.peer = peer;
    record.expected = expected;
    record.seen = seen;
    store_relaxed(&peers.control->record->extents, peers.extents);
    __threadfence_system();
    record.is_set = 1;
    // Two loops, neither unrolled: the registers they need would be missing in the kernels' main loops.
#pragma unroll 1
    for (int p = 0; p < peers.world; ++p) store_relaxed(&peers.signal_pad(p)->extents[peers.rank], peers.extents);
    for (int p = 0; p < peers.world; ++p) store_relaxed(&peers.signal_pad(p)->abort, 1 + peers.rank);
    if (peers.control->traps) {
        __threadfence_system();
        __trap();
    }
}

// The arrival of a block: adds the block to the control block's state and reads the abort flag. Separate from
// LaunchState so that input loads overlap with the latency of both. Constructed by all threads of the block.
class Arrival {
public:
    __device__ Arrival(const Peers& peers, int launch)
        : state_(&peers.control->state),
          abort_address_(&peers.signal_pad(peers.rank)->abort),
          part_(arrival(blockIdx.x, gridDim.x, launch)) {}

    // Operands for await_predecessor().
    __device__ uint64_t prepared() const {
        return reinterpret_cast<uint64_t>(state_) | reinterpret_cast<uint64_t>(abort_address_) | part_;
    }
    __device__ __forceinline__ void begin() {
        if (threadIdx.x != 0) return;
        state_before_ = add_relaxed(state_, part_);
        peer_abort_ = load_relaxed(abort_address_);
    }

    // Valid in thread 0.
    __device__ uint64_t state_before() const { return state_before_; }
    __device__ uint64_t peer_abort() const { return peer_abort_; }

private:
    uint64_t *state_, *abort_address_;
    uint64_t part_, state_before_, peer_abort_;
};

// A block's view of its launch: the expected flag, the half of the receive buffers in use, and the abort checks of wait
// loops. All threads of the block construct it and call end().
class LaunchState {
public:
    __device__ LaunchState(const Peers& peers, uint64_t fingerprint, int launch, const Arrival& arrival)
        : peers_(peers) {
        __shared__ uint64_t flag;
        __shared__ bool failed;
        if (threadIdx.x == 0) {
            const ArrivalResult arrived = read_state(arrival.state_before(), gridDim.x, launch);
            const uint64_t peer_abort = arrival.peer_abort();
            flag = flag_of(arrived.sequence, fingerprint);
            failed = peer_abort != 0 || !arrived.is_exclusive;
            if (!arrived.is_exclusive) abort_group(peers, Failure::kConcurrentKernels, peers.rank, flag, 0);
            if (peer_abort != 0) abort_group(peers, Failure::kAbortedByPeer, static_cast<int>(peer_abort - 1), flag, 0);
        }
        __syncthreads();
        flag_ = flag;
        failed_ = failed;
    }

    __device__ uint64_t flag() const { return flag_; }
    // Whether the operation uses the second half of the receive buffers.
    __device__ bool is_odd() const { return sequence_of(flag_) % 2 != 0; }
    // Offset of that half among slots of `slot_bytes` bytes.
    __device__ int64_t half(int64_t slot_bytes) const { return is_odd() ? (peers_.world - 1) * slot_bytes : 0; }
    __device__ bool failed() const { return failed_; }

    // Whether this warp continues to wait; called by all its lanes. `awaited`: the lane waits for `peer`, whose flag is
    // `seen` so far.
    __device__ bool keep_waiting(bool awaited, uint64_t seen, int peer) {
        if (++polls_ % kPollsPerCheck != 0) return true;
        if (start_ns_ == 0) start_ns_ = now_ns();
        return !(failed_ = __any_sync(~0u, check_abort(peers_, flag_, start_ns_, awaited, seen, peer)));
    }

    // To be called when the awaited data has arrived: the next wait has a timeout of its own.
    __device__ void restart_timeout() { start_ns_ = 0; }

    __device__ void end() const {
        __syncthreads();
        if (threadIdx.x == 0) add_relaxed(&peers_.control->state, departure(gridDim.x));
        // The block waits for no peer any more, so the successor may be scheduled. Not earlier: a successor that waits
        // for this kernel to end might occupy the multiprocessors that a kernel needs which peers wait for.
        let_successor_start();
    }

private:
    static constexpr unsigned kPollsPerCheck = 32;

    // Whether the operation has failed. Not inlined, to keep wait loops small.
    static __device__ __noinline__ bool check_abort(const Peers& peers, uint64_t flag, uint64_t start_ns, bool awaited,
                                                    uint64_t seen, int peer) {
        const uint64_t peer_abort = load_relaxed(&peers.signal_pad(peers.rank)->abort);
        const auto timeout = *const_cast<volatile uint64_t*>(&peers.control->timeout_ns);
        if (awaited && is_other_operation(flag, seen)) {
            abort_group(peers, Failure::kMismatch, peer, flag, seen);
        } else if (peer_abort != 0) {
            abort_group(peers, Failure::kAbortedByPeer, static_cast<int>(peer_abort - 1), flag, seen);
        } else if (!awaited || now_ns() - start_ns <= timeout) {
            return false;
        } else {
            abort_group(peers, Failure::kTimeout, peer, flag, seen);
        }
        return true;
    }

    const Peers& peers_;
    uint64_t flag_;
    uint64_t start_ns_ = 0;
    unsigned polls_ = 0;
    bool failed_;
};

}  // namespace te_graph::collectives
