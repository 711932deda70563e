// Casts to FP8 and back. No Torch here.
//
//   out      = to_fp8(clamp(fp32(x) * scale, -max, max)), rounded to nearest even; NaN gives 0x7F
//   amax     = max(amax, |x|), of x as it is, without NaNs
//   scale_inv = 1 / scale, correctly rounded
//
// All bits of the CPU loops and of the kernels are the same, those of column sums too, but for those of NaNs in fp32.
#pragma once

#include <initializer_list>
#include <span>

#include "common/dtype.h"
#include "fp8/flag.h"
#include "fp8/format.h"

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace te_graph::fp8 {

// What is counted of a cast, where counts are asked for.
enum Count { kSaturated, kUnderflowed, kNotFinite, kCounts };

// One matrix and where its casts go. 80 bytes: a row of a table in device memory, too.
struct alignas(16) Cast {
    const void* input;   // [rows, columns], of `dtype`
    uint8_t* out;        // [rows, columns]
    uint8_t* out_t;      // [columns, rows], a row of out_t_stride() bytes; nullptr: none
    const float* scale;  // [1]
    float* scale_inv;    // [1], written; nullptr: none
    float* amax;         // [1]; nullptr: none
    int64_t* counts;     // [kCounts], added to; nullptr: none
    int64_t rows, columns;
    DType dtype;
    Format format;
    bool pads_out_t;  // rows of out_t end in zeros up to a multiple of 16
    uint8_t reserved[5];
};
static_assert(sizeof(Cast) == 80);

// What FP8 matrix products want rows to be multiples of, so that sums go over whole pieces.
constexpr int64_t kPaddedRows = 16;
template <typename Int>
TE_GRAPH_HOST_DEVICE constexpr Int padded(Int rows) {
    return (rows + kPaddedRows - 1) / kPaddedRows * kPaddedRows;
}
TE_GRAPH_HOST_DEVICE constexpr int64_t out_t_stride(const Cast& cast) {
    return cast.pads_out_t ? padded(cast.rows) : cast.rows;
}

// Matrices are cast in tiles of this many rows and columns.
constexpr int64_t kTile = 128;
TE_GRAPH_HOST_DEVICE constexpr int64_t tiles_in(int64_t size, int64_t tile = kTile) { return (size + tile - 1) / tile; }
constexpr int64_t tiles_of(const Cast& cast) { return tiles_in(cast.rows) * tiles_in(cast.columns); }

// The tile `index` of matrix `entry`, counted along its rows.
struct Tile {
    int32_t entry;
    int32_t index;
};

// Sums of the input's columns, in fp32 in a fixed order: of 8 rows one after the other, of the 16 such groups of a
// tile, of the tiles.
constexpr int64_t kGroupRows = 8;
struct ColumnSums {
    void* out = nullptr;  // [columns], of `dtype`: fp32 or the input's; nullptr: none
    DType dtype = DType::kFloat32;
    float* partial = nullptr;  // [tiles_in(rows), columns], scratch of the kernels
    bool accumulate = false;   // to `out`, once they are rounded to its dtype
};

// Whether eight elements at a time can be read or written at `wide`, of fp32, fp16 or bf16, and at `fp8`.
TE_GRAPH_HOST_DEVICE inline bool is_aligned_for_eights(const void* wide, const void* fp8) {
    return reinterpret_cast<uintptr_t>(wide) % 16 == 0 && reinterpret_cast<uintptr_t>(fp8) % 8 == 0;
}

// What all matrices of a list have in common, so that a kernel made for it will do: one dtype, one format, nothing
// counted, and every eight elements of a row at a multiple of 16 bytes (8 in `out`). Else one of these.
constexpr int kMixed = 0;
constexpr int kCounted = -1;  // mixed, and something is counted
constexpr int kind_of(DType dtype, Format format) {
    return 1 + static_cast<int>(std::size(kFormats)) * static_cast<int>(dtype) + static_cast<int>(format);
}
constexpr bool is_uniform(int kind) { return kind > kMixed; }
inline int kind_of(const Cast& cast) {
    if (cast.counts) return kCounted;
    const bool is_aligned = cast.columns % 8 == 0 && is_aligned_for_eights(cast.input, cast.out);
    return is_aligned ? kind_of(cast.dtype, cast.format) : kMixed;
}

// Many matrices, all of it in the device's memory.
struct CastTable {
    const Cast* casts;  // [count]
    int64_t count;
    const Tile* tiles;  // [num_tiles]
    int64_t num_tiles;
    uint32_t* state;  // [2], zeros before and after: the next tile, and how many blocks are through
    int kind;         // of all casts
};

struct Dequantization {
    const uint8_t* input;    // [numel]
    void* out;               // [numel]
    const float* scale_inv;  // [1]
    int64_t numel;
    Format format;
    DType dtype;
};

// casts: [n], in host memory.
void cast_cpu(const Cast& cast, const Flag& noop);
void cast_transpose_cpu(const Cast& cast, const ColumnSums& sums, const Flag& noop);
void cast_weights_cpu(std::span<const Cast> casts, const Flag& noop);
void cast_weights_table_cpu(const CastTable& table, const Flag& noop);
void dequantize_cpu(const Dequantization& work);

#ifdef TE_GRAPH_CUDA
// No allocation, no host sync.
// Elements in their order, without out_t.
cudaError_t launch_cast(const Cast& cast, const Flag& noop, cudaStream_t stream);
cudaError_t launch_cast_transpose(const Cast& cast, const ColumnSums& sums, const Flag& noop, cudaStream_t stream);
// `out` of at most kMostSums from `partial`, which other kernels left of matrices [rows, columns].
constexpr int kMostSums = 3;
cudaError_t launch_column_sums(std::initializer_list<ColumnSums> each, int64_t rows, int64_t columns, const Flag& noop,
                               cudaStream_t stream);
// A launch for each 384 of them.
cudaError_t launch_cast_weights(std::span<const Cast> casts, const Flag& noop, cudaStream_t stream);
cudaError_t launch_cast_weights_table(const CastTable& table, const Flag& noop, cudaStream_t stream);
cudaError_t launch_dequantize(const Dequantization& work, cudaStream_t stream);
#endif

}  // namespace te_graph::fp8
