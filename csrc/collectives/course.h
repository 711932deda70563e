// Which lines a warp of a kernel that loops does, turn by turn, as plain functions. No Torch.
//
// Where there are few turns, every n-th four: each warp begins with its own and steps by as many as all warps do.
// Where there are many, from the fourth turn on whichever four no warp of this rank has taken yet: some
// multiprocessors send faster than others, whose blocks would else still be at it when the links have little to do.
//
// What is taken is counted. Each warp takes once in vain, so the number that the last one gets is known, and who gets
// it puts the count back to 0 without waiting for anybody. Each number of launches has a count of its own: two kernels
// at once on one GPU, which is an error, take nothing from each other, and so leave no line without its NaN.
//
// A block takes lines in their order, once it has heard its namesakes on all peers, and holds back only lines behind
// those that it waits for. So nobody holds up the first line that is waited for, and blocks that find no room beside
// others come through as ever.
#pragma once

#include "collectives/ll128.h"

namespace te_graph::collectives {

constexpr int kLinesPerWarp = 4;
// Turns from which on lines are taken: that costs half a microsecond, and saves a seventh of one a turn.
constexpr int kManyTurns = 8;
// Turns of a warp that are its own where it takes.
constexpr int kOwnTurns = 3;

// Of a block, if all blocks together do `lines` lines in so many turns: what a block has too many of warps another one
// lacks.
constexpr int threads_for(int64_t lines, int blocks, int64_t turns) {
    const int64_t of_warps = turns * blocks * kLinesPerWarp;
    return 32 * static_cast<int>((lines + of_warps - 1) / of_warps);
}

// step: the lines of a turn of all warps. number: how many were taken before.
TE_GRAPH_ANYWHERE constexpr int taken_line(int number, int step) { return kOwnTurns * step + number * kLinesPerWarp; }
// That anybody gets, of `lines` lines.
TE_GRAPH_ANYWHERE constexpr int last_number(int lines, int step) {
    const int warps = step / kLinesPerWarp, all = (lines + kLinesPerWarp - 1) / kLinesPerWarp;
    return all - kOwnTurns * warps + warps - 1;
}

}  // namespace te_graph::collectives
