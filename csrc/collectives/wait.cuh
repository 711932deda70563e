// How a kernel of a group begins and ends, and how its waiting ends when nobody comes.
#pragma once

#include "collectives/early_launch.cuh"

namespace te_graph::collectives {

__device__ inline uint64_t now_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

__device__ inline uint64_t load_relaxed(const uint64_t* place) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
    return value;
}
__device__ inline void store_relaxed(uint64_t* place, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}

__device__ inline uint64_t add_relaxed(uint64_t* place, uint64_t value) {
    uint64_t before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(place), "l"(value) : "memory");
    return before;
}

// In pieces: who reads them elsewhere sees by the flag whether all have come.
__device__ inline void store_relaxed(Extents* place, const Extents& extents) {
    constexpr int kWords = sizeof(Extents) / sizeof(uint64_t);
    for (int i = 0; i < kWords; ++i) {
        store_relaxed(reinterpret_cast<uint64_t*>(place) + i, reinterpret_cast<const uint64_t*>(&extents)[i]);
    }
}

// Gives the group up: the first thread that comes writes the record, and all peers are told, whatever the failure:
// another rank may be the one to see that operations differ.
__device__ inline __noinline__ void give_up(const Peers& peers, Failure failure, int peer, uint64_t expected,
                                            uint64_t seen) {
    if (atomicExch(&peers.control->is_claimed, 1) != 0) return;
    *const_cast<volatile float*>(&peers.control->failed) = 1.0f;
    volatile Record& record = *peers.control->record;
    record.failure = failure;
    record.peer = peer;
    record.expected = expected;
    record.seen = seen;
    store_relaxed(&peers.control->record->extents, peers.extents);
    __threadfence_system();
    record.is_set = 1;
    // Two loops, and none unrolled: registers that this takes are lacking in kernels that never come here.
#pragma unroll 1
    for (int p = 0; p < peers.world; ++p) store_relaxed(&peers.mailbox(p)->extents[peers.rank], peers.extents);
    for (int p = 0; p < peers.world; ++p) store_relaxed(&peers.mailbox(p)->abort, 1 + peers.rank);
    if (peers.control->traps) {
        __threadfence_system();
        __trap();
    }
}

// A block says that it is there, and asks how things are. Apart from Turn, so that data is loaded until the answer is
// here. All threads of the block construct it.
class Arrival {
public:
    __device__ Arrival(const Peers& peers, int launch)
        : state_(&peers.control->state),
          told_at_(&peers.mailbox(peers.rank)->abort),
          part_(arrival(blockIdx.x, gridDim.x, launch)) {}

    // For await_predecessor().
    __device__ uint64_t prepared() const {
        return reinterpret_cast<uint64_t>(state_) | reinterpret_cast<uint64_t>(told_at_) | part_;
    }
    __device__ __forceinline__ void begin() {
        if (threadIdx.x != 0) return;
        state_before_ = add_relaxed(state_, part_);
        told_ = load_relaxed(told_at_);
    }

    // Thread 0 has them.
    __device__ uint64_t state_before() const { return state_before_; }
    __device__ uint64_t told() const { return told_; }

private:
    uint64_t *state_, *told_at_;
    uint64_t part_, state_before_, told_;
};

// The part of a block in an operation. All threads of the block construct it and call end().
class Turn {
public:
    __device__ Turn(const Peers& peers, uint64_t signature, int launch, const Arrival& arrival) : peers_(peers) {
        __shared__ uint64_t flag;
        __shared__ bool failed;
        if (threadIdx.x == 0) {
            const Arrived arrived = read_state(arrival.state_before(), gridDim.x, launch);
            const uint64_t told = arrival.told();
            flag = flag_of(arrived.sequence, signature);
            failed = told != 0 || !arrived.is_alone;
            if (!arrived.is_alone) give_up(peers, Failure::kTwoKernels, peers.rank, flag, 0);
            if (told != 0) give_up(peers, Failure::kToldByPeer, static_cast<int>(told - 1), flag, 0);
        }
        __syncthreads();
        flag_ = flag;
        failed_ = failed;
    }

    __device__ uint64_t flag() const { return flag_; }
    // Of the halves of an inbox, whether it is the second one's turn.
    __device__ bool is_odd() const { return sequence_of(flag_) % 2 != 0; }
    // Where the half of an inbox begins whose slots have so many bytes.
    __device__ int64_t half(int64_t slot_bytes) const { return is_odd() ? (peers_.world - 1) * slot_bytes : 0; }
    __device__ bool failed() const { return failed_; }

    // Whether this warp goes on waiting; called by all its lanes. `awaited`: the lane waits for `seen`, a flag of
    // `peer`.
    __device__ bool goes_on(bool awaited, uint64_t seen, int peer) {
        if (++rounds_ % kRoundsPerLook != 0) return true;
        if (start_ns_ == 0) start_ns_ = now_ns();
        return !(failed_ = __any_sync(~0u, look(peers_, flag_, start_ns_, awaited, seen, peer)));
    }

    // What this warp waited for has come: it waits anew.
    __device__ void came() { start_ns_ = 0; }

    __device__ void end() const {
        __syncthreads();
        if (threadIdx.x == 0) add_relaxed(&peers_.control->state, departure(gridDim.x));
        // All that the block waits for has come: the next launch may take its place. Not earlier, for what waits for
        // this kernel to end might then keep out another one that peers wait for.
        let_successor_start();
    }

private:
    static constexpr unsigned kRoundsPerLook = 32;

    // Whether there is a reason to give up. Not inlined: what waits shall be small.
    static __device__ __noinline__ bool look(const Peers& peers, uint64_t flag, uint64_t start_ns, bool awaited,
                                             uint64_t seen, int peer) {
        const uint64_t told = load_relaxed(&peers.mailbox(peers.rank)->abort);
        const auto timeout = *const_cast<volatile uint64_t*>(&peers.control->timeout_ns);
        if (awaited && is_other_operation(flag, seen)) {
            give_up(peers, Failure::kMismatch, peer, flag, seen);
        } else if (told != 0) {
            give_up(peers, Failure::kToldByPeer, static_cast<int>(told - 1), flag, seen);
        } else if (!awaited || now_ns() - start_ns <= timeout) {
            return false;
        } else {
            give_up(peers, Failure::kTimeout, peer, flag, seen);
        }
        return true;
    }

    const Peers& peers_;
    uint64_t flag_;
    uint64_t start_ns_ = 0;
    unsigned rounds_ = 0;
    bool failed_;
};

}  // namespace te_graph::collectives
