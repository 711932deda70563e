// Formula: out = all x one behind the other.
// Grid: blocks of 2 x 256 threads, each with every n-th tile; one half sends, the other one receives, so that links
// and memory are busy at once.
// Bytes per element: read once, sent world - 1 times, written once; what is received outside of a pool is read,
// written and emptied.
// Determinism: bytes are only moved.
// A block waits for the blocks of peers that have the same tiles, never for one of its own GPU.
#include "collectives/tiles.cuh"

namespace te_graph::collectives {
namespace {

class Tiles {
public:
    __device__ Tiles(const Peers& peers, const Job& job, Turn& turn)
        : peers_(peers), job_(job), turn_(turn), is_failed_(turn.failed()) {}

    // Says where the output lies.
    __device__ void say_hello() {
        if (blockIdx.x != 0 || threadIdx.x >= 8 || is_failed_) return;
        const Part part{static_cast<uint64_t>(job_.pool_offset), 0};
        for_each_peer([&](int p) { send_part(part_of(slot_at(p).hello()), part, turn_.flag()); });
    }

    // Hears where the outputs of the peers lie. All threads of the half that sends call it.
    __device__ void hear_hellos(int64_t* offsets /* [kMaxRanks], shared */) {
        for (int p = thread_of_half() / 32; p < peers_.world; p += kTileThreads / 32) {
            if (p == peers_.rank || is_failed_) continue;
            while (true) {
                const Part part = look_at_part(part_of(slot_of(p).hello()));
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
        is_failed_ = meet_in_half(is_failed_);
        offsets_ = offsets;
    }

    // Loads the tile that is sent next.
    __device__ void prepare(int64_t tile) { load_tile(job_.input.begin(0), job_.input.size(0), tile, ready_); }

    // To this rank's own output and to all peers. `next` is loaded meanwhile.
    __device__ void send(int64_t tile, int64_t next) {
        if (is_failed_) poison(ready_);
        store_tile(job_.out.begin(peers_.rank), job_.out.size(peers_.rank), tile, ready_);
        if (is_failed_) return;
        for_each_peer([&](int p) {
            if (offsets_[p] >= 0) {
                char* const out = peers_.pool[p] + offsets_[p] + peers_.rank * job_.out.stride;
                store_tile(out, job_.out.size(peers_.rank), tile, ready_);
            } else {
                store_whole(slot_at(p).tiles(), tile, ready_);
            }
        });
        prepare(next);
        meet_in_half();
        if (thread_of_half() == 0) raise(tile);
    }

    // What peers have sent is in place, or is copied there.
    __device__ void gather(int64_t tile) {
        const bool came = await(tile);
        if (came && job_.pool_offset >= 0) return;
        for_each_peer([&](int p) {
            Vectors vectors;
            if (came) {
#pragma unroll
                for (int i = 0; i < kVectors; ++i) vectors[i] = load_received(slot_of(p).tiles(), tile, i);
            } else {
                poison(vectors);
            }
            store_tile(job_.out.begin(p), job_.out.size(p), tile, vectors);
            if (came) empty(slot_of(p).tiles(), tile);
        });
    }

private:
    __device__ TileSlot slot_at(int peer) const { return {peers_, turn_, peers_.rank, peer}; }
    __device__ TileSlot slot_of(int peer) const { return {peers_, turn_, peer, peers_.rank}; }

    // Each rank begins behind itself, so that no link has all at once.
    template <typename Function>
    __device__ void for_each_peer(const Function& function) const {
        for (int i = 1; i < peers_.world; ++i) {
            function(peers_.rank + i < peers_.world ? peers_.rank + i : peers_.rank + i - peers_.world);
        }
    }

    // NaN in every float format.
    __device__ static void poison(Vectors& vectors) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) vectors[i] = {~0ull, ~0ull};
    }
    __device__ static void empty(char* tiles, int64_t tile) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            *reinterpret_cast<Vector*>(tiles + vector_offset(tile, i)) = {kEmpty, kEmpty};
        }
    }

    __device__ static void store_whole(char* tiles, int64_t tile, const Vectors& vectors) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            *reinterpret_cast<Vector*>(tiles + vector_offset(tile, i)) = vectors[i];
        }
    }

    // Says that a tile is there, which all threads of the half have written before they met.
    __device__ void raise(int64_t tile) const {
        __threadfence_system();
        for_each_peer([&](int p) { store_relaxed(slot_at(p).flag(tile), turn_.flag()); });
    }

    // Whether a tile of all peers has come: each lane of the first warp waits for one of them.
    __device__ bool await(int64_t tile) {
        if (thread_of_half() < 32 && !is_failed_) {
            const int peer = thread_of_half();
            const bool is_awaited = peer < peers_.world && peer != peers_.rank;
            const uint64_t* const place = is_awaited ? slot_of(peer).flag(tile) : nullptr;
            while (true) {
                uint64_t seen = is_awaited ? load_acquire(place) : turn_.flag();
                const bool is_missing = seen != turn_.flag();
                if (!__any_sync(~0u, is_missing)) break;
                // A peer that is at another operation raises no flag here.
                if (is_missing) seen = slot_of(peer).hello_flag();
                // Who has come may wait for another one: it is not to blame where somebody has not come at all.
                const bool is_absent = is_missing && seen != turn_.flag();
                const bool is_to_blame = __any_sync(~0u, is_absent) ? is_absent : is_missing;
                if (!turn_.goes_on(is_to_blame, seen, peer)) {
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
    const int64_t* offsets_ = nullptr;
    Vectors ready_;
    bool is_failed_;
};

__global__ void __launch_bounds__(2 * kTileThreads, 1)
    tiles_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    __shared__ int64_t offsets[kMaxRanks];
    Arrival arrival(peers, job.launch);
    await_predecessor(arrival.prepared());
    arrival.begin();
    Turn turn(peers, job.signature, job.launch, arrival);
    Tiles tiles(peers, job, turn);
    tiles.say_hello();
    if (half_of_block() == Half::kSender) {
        tiles.prepare(blockIdx.x);
        tiles.hear_hellos(offsets);
        for (int64_t tile = blockIdx.x; tile < job.count; tile += gridDim.x) tiles.send(tile, tile + gridDim.x);
    } else {
        for (int64_t tile = blockIdx.x; tile < job.count; tile += gridDim.x) tiles.gather(tile);
    }
    turn.end();
}

}  // namespace

cudaError_t launch_tiles(const Peers& peers, const Job& job, cudaStream_t stream) {
    return launch_early(tiles_kernel, 2 * kTileThreads, peers, job, stream);
}

}  // namespace te_graph::collectives
