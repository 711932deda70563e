// Formula: as lines.cu, for large operations.
// Grid: blocks of 2 x 256 threads, each with every n-th tile of each piece; one half sends, the other one receives, so that
// links and memory are busy at once. A tile is written when it has been sent, so `out` may be `input`.
// Bytes per element: one-step reduce: read twice, received world - 1 times, written once; as many on the wire as sent.
// Determinism: the order of the sum is that of the ranks.
// A block waits for the blocks of peers that have the same tiles, never for one of its own GPU.
#include "collectives/element.cuh"
#include "collectives/tiles.cuh"

namespace te_graph::collectives {
namespace {

// Tiles that a receiver sends sums of before it waits for what the peers made of the first one.
constexpr int kAhead = 2;

// Vectors that a thread sums at a time: fewer where there are more ranks.
template <int kMost>
constexpr int kTogether = kMost <= 2 ? 2 : 1;

template <typename T, Reduction kReduction, Steps kSteps, int kMost>
class Tiles {
public:
    // sent: shared, 0: tiles that the sending half is done with.
    __device__ Tiles(const Peers& peers, const Job& job, Turn& turn, volatile int64_t& sent)
        : peers_(peers), job_(job), turn_(turn), sent_(sent), is_failed_(turn.failed()) {}

    // Says where the output lies.
    __device__ void say_hello() {
        if (blockIdx.x != 0 || threadIdx.x >= 8 || is_failed_) return;
        const Part part{static_cast<uint64_t>(job_.pool_offset), 0};
        for_each_peer([&](int p) { send_part(slot_at(p).hello(), 0, part, turn_.flag()); });
    }

    // Hears where the outputs of the peers lie. All threads of the block call it.
    __device__ void hear_hellos(int64_t* offsets /* [kMaxRanks], shared */) {
        for (int p = threadIdx.x / 32; p < peers_.world; p += 2 * kTileThreads / 32) {
            if (p == peers_.rank || is_failed_) continue;
            while (true) {
                const Part part = look_at_part(slot_of(p).hello(), 0);
                const bool is_missing = has_flag() && part.second != turn_.flag();
                if (threadIdx.x % 32 == 0) offsets[p] = static_cast<int64_t>(part.first);
                if (!__any_sync(~0u, is_missing)) break;
                if (!turn_.goes_on(is_missing, part.second, p)) {
                    is_failed_ = true;
                    break;
                }
            }
        }
        turn_.came();
        is_failed_ = __syncthreads_or(is_failed_);
        offsets_ = offsets;
    }

    // The tile that is sent first where all peers get the same one.
    __device__ void prepare(int64_t tile) {
        if (job_.input.stride == 0) load_tile(job_.input.begin(0), job_.input.size(0), tile, ready_);
    }

    // Input tile to the peers' slots; of an all-gather, to where it is wanted. `next` is loaded meanwhile; `turn` counts
    // tiles of the block.
    __device__ void send(int64_t tile, int64_t next, int64_t turn) {
        if constexpr (kSteps == Steps::kSend) {
            if (is_failed_) poison(ready_);
            store_tile(job_.out.begin(peers_.rank), job_.out.size(peers_.rank), tile, ready_);
            deliver(tile, ready_, next);
        } else {
            if (!is_failed_) {
                for_each_peer([&](int p) {
                    if (job_.input.stride != 0) load_tile(job_.input.begin(p), job_.input.size(p), tile, ready_);
                    store_whole(slot_at(p).tiles(0), tile, ready_);
                });
                prepare(next);
            }
            meet_in_half();
            if (thread_of_half() == 0) {
                sent_ = turn + 1;
                if (!is_failed_) raise(tile);
            }
        }
    }

    __device__ void reduce(int64_t tile, int64_t turn) {
        Vectors sums;
        while (sent_ <= turn) {
        }
        const int piece = kSteps == Steps::kReduceSend ? peers_.rank : 0;
        load_tile(job_.input.begin(peers_.rank), job_.input.size(peers_.rank), tile, sums);
        if (await(tile)) {
#pragma unroll
            for (int i = 0; i < kVectors; i += kTogether<kMost>) add_received(tile, i, sums);
        } else {
            poison(sums);
        }
        store_tile(job_.out.begin(piece), job_.out.size(piece), tile, sums);
        if constexpr (kSteps == Steps::kReduceSend) deliver(tile, sums, -1);
    }

    // What peers have delivered is in place, or is copied there.
    __device__ void gather(int64_t tile) {
        const bool came = await(first_sum() + tile);
        for_each_peer([&](int p) {
            Vectors vectors;
            if (came && job_.pool_offset >= 0) return;
            if (came) {
#pragma unroll
                for (int i = 0; i < kVectors; ++i) {
                    vectors[i] = load_received(slot_of(p).tiles(first_sum()), tile, i);
                }
            } else {
                poison(vectors);
            }
            store_tile(job_.out.begin(p), job_.out.size(p), tile, vectors);
        });
    }

private:
    __device__ TileSlot slot_at(int peer) const { return {peers_, turn_, peers_.rank, peer}; }
    __device__ TileSlot slot_of(int peer) const { return {peers_, turn_, peer, peers_.rank}; }
    __device__ int64_t first_sum() const { return kSteps == Steps::kReduceSend ? job_.count : 0; }

    // Each rank begins behind itself, so that no link has all at once.
    template <typename Function>
    __device__ void for_each_peer(const Function& function) const {
        for (int i = 1; i < peers_.world; ++i) {
            function(peers_.rank + i < peers_.world ? peers_.rank + i : peers_.rank + i - peers_.world);
        }
    }

    __device__ static void poison(Vectors& vectors) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) vectors[i] = {~0ull, ~0ull};
    }

    __device__ static void store_whole(char* tiles, int64_t tile, const Vectors& vectors) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            *reinterpret_cast<Vector*>(tiles + vector_offset(tile, i)) = vectors[i];
        }
    }

    // Vectors `first` and some that follow: of this rank before, the sums after.
    __device__ void add_received(int64_t tile, int first, Vectors& sums) const {
        Vector all[kTogether<kMost>][kMost];
#pragma unroll
        for (int i = 0; i < kTogether<kMost>; ++i) {
#pragma unroll
            for (int p = 0; p < kMost; ++p) {
                all[i][p] = sums[first + i];
                if (p == peers_.rank || p >= peers_.world) continue;
                all[i][p] = load_received(slot_of(p).tiles(0), tile, first + i);
            }
        }
#pragma unroll
        for (int i = 0; i < kTogether<kMost>; ++i) {
            uint64_t words[2][kMost];
#pragma unroll
            for (int p = 0; p < kMost; ++p) {
                words[0][p] = all[i][p].first;
                words[1][p] = all[i][p].second;
            }
            sums[first + i] = {reduce_words<T, kReduction>(words[0], peers_.world),
                               reduce_words<T, kReduction>(words[1], peers_.world)};
        }
    }

    // This rank's part of the result, to all; and loads what is sent next, if anything is.
    __device__ void deliver(int64_t tile, const Vectors& vectors, int64_t next) {
        if (is_failed_) return;
        for_each_peer([&](int p) {
            if (offsets_[p] >= 0) {
                char* const out = peers_.pool[p] + offsets_[p] + peers_.rank * job_.out.stride;
                store_tile(out, job_.out.size(peers_.rank), tile, vectors);
            } else {
                store_whole(slot_at(p).tiles(first_sum()), tile, vectors);
            }
        });
        if (next >= 0) prepare(next);
        meet_in_half();
        if (thread_of_half() == 0) raise(first_sum() + tile);
    }

    // Says that a tile is there, which all threads of the half have written before they met.
    __device__ void raise(int64_t flag) const {
        __threadfence_system();
        for_each_peer([&](int p) { store_relaxed(slot_at(p).flag(flag), turn_.flag()); });
    }

    // Whether a tile of all peers has come: each lane of the first warp waits for one of them.
    __device__ bool await(int64_t flag) {
        if (thread_of_half() < 32 && !is_failed_) {
            const int peer = thread_of_half();
            const bool is_awaited = peer < peers_.world && peer != peers_.rank;
            const uint64_t* const place = is_awaited ? slot_of(peer).flag(flag) : nullptr;
            while (true) {
                uint64_t seen = is_awaited ? load_acquire(place) : turn_.flag();
                const bool is_missing = seen != turn_.flag();
                if (!__any_sync(~0u, is_missing)) break;
                // A peer that is at an operation by lines raises no flag here.
                if (is_missing) seen = slot_of(peer).hello_flag();
                if (!turn_.goes_on(is_missing, seen, peer)) {
                    is_failed_ = true;
                    break;
                }
            }
            turn_.came();
        }
        is_failed_ = meet_in_half(is_failed_);
        return !is_failed_;
    }

    const Peers& peers_;
    const Job& job_;
    Turn& turn_;
    volatile int64_t& sent_;
    const int64_t* offsets_ = nullptr;
    Vectors ready_;
    bool is_failed_;
};

template <typename T, Reduction kReduction, Steps kSteps, int kMost>
__global__ void __launch_bounds__(2 * kTileThreads, 1)
    tiles_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    constexpr bool kReduces = kSteps != Steps::kSend;
    constexpr bool kGathers = kSteps == Steps::kReduceSend || kSteps == Steps::kSend;
    constexpr int kDelay = kSteps == Steps::kReduceSend ? kAhead : 0;
    __shared__ int64_t offsets[kMaxRanks];
    __shared__ volatile int64_t sent;
    if (threadIdx.x == 0) sent = 0;
    Turn turn(peers, job.signature, job.launch);
    Tiles<T, kReduction, kSteps, kMost> tiles(peers, job, turn, sent);
    tiles.say_hello();
    if constexpr (kGathers) tiles.hear_hellos(offsets);
    const int64_t first = blockIdx.x, step = gridDim.x;
    const int64_t turns = first < job.count ? (job.count - first + step - 1) / step : 0;
    if (half_of_block() == Half::kSender) {
        tiles.prepare(first);
        for (int64_t i = 0; i < turns; ++i) tiles.send(first + i * step, first + (i + 1) * step, i);
        return;
    }
    for (int64_t i = 0; i < turns + kDelay; ++i) {
        if (kReduces && i < turns) tiles.reduce(first + i * step, i);
        if constexpr (kGathers) {
            if (kDelay <= i) tiles.gather(first + (i - kDelay) * step);
        }
    }
    turn.end(kTileThreads);
}

template <typename T, Reduction kReduction, Steps kSteps>
cudaError_t launch(const Peers& peers, const Job& job, cudaStream_t stream) {
    const auto kernel = peers.world <= 2   ? tiles_kernel<T, kReduction, kSteps, 2>
                        : peers.world <= 4 ? tiles_kernel<T, kReduction, kSteps, 4>
                                           : tiles_kernel<T, kReduction, kSteps, 8>;
    kernel<<<job.blocks, 2 * kTileThreads, 0, stream>>>(job, peers);
    return cudaGetLastError();
}

}  // namespace

cudaError_t launch_tiles(const Peers& peers, const Job& job, cudaStream_t stream) {
    if (job.steps == Steps::kSend) return launch<float, Reduction::kSum, Steps::kSend>(peers, job, stream);
    return with_reduction(job.element, job.reduction, [&]<typename T, Reduction kReduction>() {
        // A one-step all-reduce is a reduce-scatter whose pieces are all the whole.
        return job.steps == Steps::kReduceSend ? launch<T, kReduction, Steps::kReduceSend>(peers, job, stream)
                                               : launch<T, kReduction, Steps::kScatter>(peers, job, stream);
    });
}

}  // namespace te_graph::collectives
