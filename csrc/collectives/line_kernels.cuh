// The kernels of operations whose data shows by itself that it has come: by lines, or by words.
// What a thread does with a line is in line_steps.cuh.
//
// Formula: out = x_0 + x_1 + ... in the order of the ranks, in fp32, rounded once (or the largest, or all x one behind
// the other), for words of 8 bytes.
// Grid: blocks of up to 1024 threads; a warp does four lines of each piece at a time, course.h says which, a thread
// 16 bytes of each line.
// A thread reads and writes the same words in all steps, so `out` may be `input`.
// Determinism: the order of the sum is that of the ranks, so bits depend on the elements alone, not on size or time.
// Blocks wait for peers only, never for each other, so all need not be resident at once.
#pragma once

#include "collectives/course.cuh"
#include "collectives/line_steps.cuh"

namespace te_graph::collectives {

// Of the kernel for what each thread does a few lines of: wider blocks reach further.
template <int kWorld>
constexpr int kOnceThreads = kWorld == 2 ? 1024 : 512;

template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kWorld, bool kTakes>
__global__ void __launch_bounds__(Wire::threads(kWorld), 1)
    lines_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    using Work = Line<Wire, T, kReduction, kSteps, kWorld>;
    constexpr bool kReduces = kSteps != Steps::kSend, kGathers = kSteps == Steps::kReduceSend || !kReduces;
    // Turns from sending a line to the last that is done with it.
    constexpr int kDelay = kSteps == Steps::kReduceSend ? 2 * Wire::kAhead : Wire::kAhead;
    constexpr bool kKeepsOwn = Wire::kAhead == 1 && Work::kSendsSame;
    Work work(peers, job);
    Arrival arrival(peers, job.launch);
    Course<kDelay, kTakes> course(peers, job);

    await_predecessor(arrival.prepared() | work.prepared(course.line(0)));
    arrival.begin();
    typename Work::Loaded parts;
    work.load(course.line(0), parts);  // does not wait for the turn
    Turn turn(peers, job.signature, job.launch, arrival);
    work.enter(turn);
    work.send(turn, course.line(0), parts);
    // Behind the first data: links would else be idle for as long as it takes to say it.
    Wire::template say_hello<kWorld>(peers, turn);
    Part own = parts[0];  // of what is summed next, where that is what was sent last
    work.load(course.next_line(), parts);
    Wire::hear_hellos(peers, turn, [] {});
    course.begin();
    for (int rest = kDelay; course.has(0) || --rest >= 0; course.advance()) {
        const Part sent = parts[0];
        if (course.has(0)) {
            work.send(turn, course.line(0), parts);
            work.load(course.next_line(), parts);
        }
        if constexpr (kReduces) {
            if (course.has(Wire::kAhead)) {
                const int line = course.line(Wire::kAhead);
                typename Work::Found found;
                work.look(line, found);
                work.reduce(turn, line, kKeepsOwn ? own : work.own_part(line), found);
            }
        }
        own = sent;
        if constexpr (kGathers) {
            if (course.has(kDelay)) {
                const int line = course.line(kDelay);
                typename Work::Found found;
                if constexpr (kSteps == Steps::kReduceSend) {
                    work.look_at_sums(line, found);
                } else {
                    work.look(line, found);
                }
                work.gather(turn, line, found);
            }
        }
    }
    turn.end();
}

// The same for operations so small that each thread has kLines lines at most: no loop, since a microsecond is all
// there is.
template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kWorld, int kLines>
__global__ void __launch_bounds__(kOnceThreads<kWorld>, 1)
    lines_once_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    using Work = Line<Wire, T, kReduction, kSteps, kWorld>;
    Work work(peers, job);
    Arrival arrival(peers, job.launch);
    const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int step = static_cast<int>(gridDim.x * blockDim.x) / 8;
    await_predecessor(arrival.prepared() | work.prepared(first));
    arrival.begin();
    typename Work::Loaded parts[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) work.load(first + i * step, parts[i]);
    Turn turn(peers, job.signature, job.launch, arrival);
    work.enter(turn);
#pragma unroll
    for (int i = 0; i < kLines; ++i) work.send(turn, first + i * step, parts[i]);
    Wire::template say_hello<kWorld>(peers, turn);
    // A line is looked at while the one before is waited for.
    typename Work::Found found[2];
    Wire::hear_hellos(peers, turn, [&] { work.look(first, found[0]); });
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        const int line = first + i * step;
        if (i + 1 < kLines) work.look(line + step, found[(i + 1) % 2]);
        if constexpr (kSteps == Steps::kSend) {
            work.gather(turn, line, found[i % 2]);
        } else {
            work.reduce(turn, line, Work::kSendsSame ? parts[i][0] : work.own_part(line), found[i % 2]);
        }
    }
    turn.end();
}

template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kWorld>
cudaError_t launch_for(const Peers& peers, const Job& job, cudaStream_t stream) {
    if constexpr (kSteps != Steps::kReduceSend) {
        const auto launch_once = [&]<int kLines>() {
            return launch_early(lines_once_kernel<Wire, T, kReduction, kSteps, kWorld, kLines>,
                                threads_for(job.count, job.blocks, kLines), peers, job, stream);
        };
        const int64_t lines = static_cast<int64_t>(job.blocks) * kOnceThreads<kWorld> / 8;
        constexpr int kMostLines = kWorld == 2 && kSteps != Steps::kScatter ? Wire::kMostLines : 1;
        if (job.count <= lines) return launch_once.template operator()<1>();
        if constexpr (kMostLines >= 2) {
            if (job.count <= 2 * lines) return launch_once.template operator()<2>();
        }
        if constexpr (kMostLines >= 4) {
            if (job.count <= 4 * lines) return launch_once.template operator()<4>();
        }
    }
    const int64_t lines = static_cast<int64_t>(job.blocks) * Wire::threads(kWorld) / 8;
    const int64_t turns = (job.count + lines - 1) / lines;
    // Who has heard nobody may not take lines, and all-reduces in one step are small.
    if constexpr (Wire::kSaysHello && kSteps != Steps::kReduce) {
        if (turns >= kManyTurns) {
            return launch_early(lines_kernel<Wire, T, kReduction, kSteps, kWorld, true>,
                                threads_for(job.count, job.blocks, turns), peers, job, stream);
        }
    }
    return launch_early(lines_kernel<Wire, T, kReduction, kSteps, kWorld, false>,
                        threads_for(job.count, job.blocks, turns), peers, job, stream);
}

template <typename Wire, typename T, Reduction kReduction, Steps kSteps>
cudaError_t launch(const Peers& peers, const Job& job, cudaStream_t stream) {
    return peers.world == 2   ? launch_for<Wire, T, kReduction, kSteps, 2>(peers, job, stream)
           : peers.world == 4 ? launch_for<Wire, T, kReduction, kSteps, 4>(peers, job, stream)
           : peers.world == 8 ? launch_for<Wire, T, kReduction, kSteps, 8>(peers, job, stream)
                              : launch_for<Wire, T, kReduction, kSteps, kAnyWorld>(peers, job, stream);
}

// Of job.steps but kSend.
template <typename Wire>
cudaError_t launch_reduction(const Peers& peers, const Job& job, cudaStream_t stream) {
    return with_reduction(job.element, job.reduction, [&]<typename T, Reduction kReduction>() {
        return job.steps == Steps::kReduce    ? launch<Wire, T, kReduction, Steps::kReduce>(peers, job, stream)
               : job.steps == Steps::kScatter ? launch<Wire, T, kReduction, Steps::kScatter>(peers, job, stream)
                                              : launch<Wire, T, kReduction, Steps::kReduceSend>(peers, job, stream);
    });
}

}  // namespace te_graph::collectives
