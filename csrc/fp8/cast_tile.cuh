// One tile of a cast with a transposed copy, by one block.
//
// Of a wide tile a thread holds 8 x 8 elements: 16 threads read 128 neighbours of a row, and write them as FP8.
// Transposed in registers, they go through shared memory, from which 8 threads write 128 neighbours of a column. Of a
// thin one it holds 2 x 8.
#pragma once

#include "fp8/column_sums.cuh"
#include "fp8/findings.cuh"

namespace te_graph::fp8 {

// What else is made of the elements than their casts and amax.
enum class Extra { kNone, kSums, kSumsAndCounts };
constexpr bool has_counts(Extra extra) { return extra == Extra::kSumsAndCounts; }
constexpr bool has_sums(Extra extra) { return extra != Extra::kNone; }

template <Extra kExtra, Tiling kTiling>
struct Shared {
    // Of each column pieces of 8 rows, where place_of() says; read two at a time.
    alignas(16) uint2 transposed[columns_of(kTiling)][kGroups];
    BlockFindings<has_counts(kExtra)> findings;
    float sums[has_sums(kExtra) ? kGroups : 1][columns_of(kTiling)];
    SharedTerms<has_sums(kExtra) ? kTiling : Tiling::kWide> terms;
};
// Where piece `piece` of a column of eight `lane` lies, so that threads of a warp, which write columns 8 apart, meet in
// no bank.
template <Tiling kTiling>
__device__ int place_of(int piece, int lane) {
    return piece ^ lane * (kGroups / lanes_of(kTiling));
}

// rows: 8 x 8 bytes, row by row; on return column by column.
__device__ inline void transpose(uint2 (&rows)[8]) {
    const auto quarter = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t(&out)[4]) {
        const uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
        const uint32_t AB = __byte_perm(a, b, 0x7362), CD = __byte_perm(c, d, 0x7362);
        out[0] = __byte_perm(ab, cd, 0x5410);
        out[1] = __byte_perm(ab, cd, 0x7632);
        out[2] = __byte_perm(AB, CD, 0x5410);
        out[3] = __byte_perm(AB, CD, 0x7632);
    };
    uint32_t left_top[4], left_bottom[4], right_top[4], right_bottom[4];
    quarter(rows[0].x, rows[1].x, rows[2].x, rows[3].x, left_top);
    quarter(rows[4].x, rows[5].x, rows[6].x, rows[7].x, left_bottom);
    quarter(rows[0].y, rows[1].y, rows[2].y, rows[3].y, right_top);
    quarter(rows[4].y, rows[5].y, rows[6].y, rows[7].y, right_bottom);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        rows[k] = {left_top[k], left_bottom[k]};
        rows[k + 4] = {right_top[k], right_bottom[k]};
    }
}

// Puts the bytes of a thread's rows, of eight columns, where they are read along the columns.
template <Tiling kTiling>
__device__ void put_transposed(uint2 (&rows)[rows_of(kTiling)], uint2 (&transposed)[columns_of(kTiling)][kGroups]) {
    const int lane = threadIdx.x % lanes_of(kTiling), first = threadIdx.x / lanes_of(kTiling);
    if constexpr (kTiling == Tiling::kWide) {
        transpose(rows);
#pragma unroll
        for (int k = 0; k < 8; ++k) transposed[lane * 8 + k][place_of<kTiling>(first, lane)] = rows[k];
    } else {
        constexpr int kPairs = kGroupRows / 2;  // of a piece
        const uint32_t pairs[] = {__byte_perm(rows[0].x, rows[1].x, 0x5140), __byte_perm(rows[0].x, rows[1].x, 0x7362),
                                  __byte_perm(rows[0].y, rows[1].y, 0x5140), __byte_perm(rows[0].y, rows[1].y, 0x7362)};
        const int place = place_of<kTiling>(first / kPairs, lane);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            auto* const piece = reinterpret_cast<uint16_t*>(&transposed[lane * 8 + k][place]);
            piece[first % kPairs] = static_cast<uint16_t>(pairs[k / 2] >> k % 2 * 16);
        }
    }
}

struct Position {
    int64_t row, column;
};
// Of the first element of a thread.
template <Tiling kTiling>
__device__ Position position_in(const Corner& corner) {
    constexpr int kLanes = lanes_of(kTiling);
    return {corner.top + threadIdx.x / kLanes * rows_of(kTiling), corner.left + threadIdx.x % kLanes * 8};
}

// Where the elements of a thread come from: here, those of a matrix. Others make them of what they load; what is not
// inside of the matrix is zero.
template <typename T>
struct MatrixSource {
    using Loaded = Vector<T, 8>;
    static constexpr int kLoads = 1;  // eights that an eight is made of

    const T* first;
    int64_t stride;
    __device__ MatrixSource(const Cast& cast, const Position& position)
        : first(static_cast<const T*>(cast.input) + position.row * cast.columns + position.column),
          stride(cast.columns) {}

    // Those of row i of the thread; zeros from `end` on.
    template <bool kAligned>
    __device__ Loaded load(int i, int64_t end) const {
        return load_eight<kAligned>(first + i * stride, end);
    }
    __device__ void prepare() {}  // for make(), once the first rows are on their way
    __device__ Vector<T, 8> make(int, const Loaded& loaded, bool) const { return loaded; }
};

// Reads a tile of what `source` has, writes its cast, and leaves the rest in `shared`. kAligned: eights of a row are
// aligned, and within the matrix or behind it.
template <typename T, Format kFormat, bool kAligned, Extra kExtra, Tiling kTiling, typename Source>
__device__ void read_tile(Source& source, const Cast& cast, const ColumnSums& column_sums, const Position& position,
                          Shared<kExtra, kTiling>& shared) {
    constexpr int kRows = rows_of(kTiling);
    const auto [row, column] = position;
    uint8_t* const out = cast.out + row * cast.columns + column;
    const int64_t columns = cast.columns - column;
    const float scale = *cast.scale;

    Findings<has_counts(kExtra)> findings;
    ThreadSums<kTiling> sums;
    uint2 bytes[kRows];
    // About 128 bytes in flight for each thread.
    constexpr int kBatch = std::min<int>(kRows, 16 / sizeof(T) / (Source::kLoads == 3 ? 4 : Source::kLoads));
    static_assert(kRows % kBatch == 0);
#pragma unroll
    for (int first = 0; first < kRows; first += kBatch) {
        typename Source::Loaded batch[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int i = first + b;
            batch[b] = source.template load<kAligned>(i, row + i < cast.rows ? columns : 0);
        }
        if (first == 0) source.prepare();
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int i = first + b;
            const Vector<T, 8> made = source.make(i, batch[b], row + i < cast.rows && columns > 0);
            bytes[i] = findings.template cast<kFormat>(made.values, scale);
            store_eight<kAligned>(out + i * cast.columns, bytes[i], row + i < cast.rows ? columns : 0);
            if constexpr (has_sums(kExtra)) {
#pragma unroll
                for (int k = 0; k < 8; ++k) sums.add(i, k, widen(made.values[k]));
            }
        }
    }
    shared.findings.put(findings);
    if constexpr (has_sums(kExtra)) {
        if (column_sums.out) TileSums<kTiling>{column_sums, shared.sums}.put(sums, shared.terms);
    }
    if (cast.out_t) put_transposed<kTiling>(bytes, shared.transposed);
}

template <Extra kExtra, Tiling kTiling>
__device__ void write_transposed(const Cast& cast, const Corner& corner, const Shared<kExtra, kTiling>& shared) {
    const int64_t stride = out_t_stride(cast);
    const bool is_aligned = stride % 16 == 0 && reinterpret_cast<uintptr_t>(cast.out_t) % 16 == 0;
    constexpr int kPieces = kTile / 16;  // of a column
#pragma unroll
    for (int i = threadIdx.x; i < columns_of(kTiling) * kPieces; i += kThreads) {
        const int column = i / kPieces, piece = i % kPieces, place = place_of<kTiling>(2 * piece, column / 8);
        uint4 bytes = reinterpret_cast<const uint4*>(shared.transposed[column])[place / 2];
        if (place % 2) bytes = {bytes.z, bytes.w, bytes.x, bytes.y};
        const int64_t row = corner.top + piece * 16, at = corner.left + column;
        if (at >= cast.columns || row >= stride) continue;
        uint8_t* const out = cast.out_t + at * stride + row;
        if (is_aligned) {
            *reinterpret_cast<uint4*>(out) = bytes;
        } else {
            store_eight<false>(out, {bytes.x, bytes.y}, stride - row);
            store_eight<false>(out + 8, {bytes.z, bytes.w}, stride - row - 8);
        }
    }
}

// The tile `index` after read_tile() and a barrier: what the threads left in `shared`.
template <Extra kExtra, Tiling kTiling>
__device__ void write_tile(const Cast& cast, const Corner& corner, int index, const Shared<kExtra, kTiling>& shared) {
    if (cast.out_t) write_transposed(cast, corner, shared);
    shared.findings.flush(cast);
    if (index == 0 && threadIdx.x == 0 && cast.scale_inv) *cast.scale_inv = __frcp_rn(*cast.scale);
}

// How tiles are read where casts differ, and where all are of one kind (cast.h).
struct Mixed {
    template <Extra kExtra, Tiling kTiling>
    static __device__ void read(const Cast& cast, const ColumnSums& column_sums, const Corner& corner,
                                Shared<kExtra, kTiling>& shared) {
        with_cast(cast, [&]<typename T, Format kFormat>() {
            const Position position = position_in<kTiling>(corner);
            MatrixSource<T> source(cast, position);
            if (cast.columns % 8 == 0 && is_aligned_for_eights(cast.input, cast.out)) {
                read_tile<T, kFormat, true>(source, cast, column_sums, position, shared);
            } else {
                read_tile<T, kFormat, false>(source, cast, column_sums, position, shared);
            }
        });
    }
};
template <typename T, Format kFormat>
struct Uniform {
    template <Extra kExtra, Tiling kTiling>
    static __device__ void read(const Cast& cast, const ColumnSums& column_sums, const Corner& corner,
                                Shared<kExtra, kTiling>& shared) {
        const Position position = position_in<kTiling>(corner);
        MatrixSource<T> source(cast, position);
        read_tile<T, kFormat, true>(source, cast, column_sums, position, shared);
    }
};

// Calls function.operator()<Kind, kExtra>() with what reads casts of `kind`, and sums if that is wanted.
template <bool kWithSums, typename Function>
void with_kind(int kind, const Function& function) {
    constexpr Extra kExtra = kWithSums ? Extra::kSums : Extra::kNone;
    const auto try_format = [&]<Format kFormat>() {
        if (kind == kind_of(DType::kBFloat16, kFormat)) {
            function.template operator()<Uniform<__nv_bfloat16, kFormat>, kExtra>();
        } else if (kind == kind_of(DType::kFloat16, kFormat)) {
            function.template operator()<Uniform<__half, kFormat>, kExtra>();
        } else if (kind == kind_of(DType::kFloat32, kFormat)) {
            function.template operator()<Uniform<float, kFormat>, kExtra>();
        } else {
            return false;
        }
        return true;
    };
    for (const Format format : kFormats) {
        if (with_format(format, try_format)) return;
    }
    if (kind == kCounted) {
        function.template operator()<Mixed, Extra::kSumsAndCounts>();
    } else {
        function.template operator()<Mixed, kExtra>();
    }
}

// Blocks that shall reside on a multiprocessor: fewer where threads hold more.
template <Extra kExtra>
constexpr int kResident = has_counts(kExtra) ? 2 : 3;

}  // namespace te_graph::fp8
