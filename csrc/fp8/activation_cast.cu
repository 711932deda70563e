// Activations, their derivatives, and casts of both.
#include "fp8/activation_source.cuh"
#include "fp8/current_scale.cuh"

namespace te_graph::fp8 {
namespace {

// Grid: one block of 256 threads for a tile of what is made, of 128 x 128 or of 128 x 32 elements (cast_tile.cuh).
// Bytes per element made, of b bytes: for y, b read (gated 2 b); for the gradient of x, 2 b read (gated 2.5 b, which
// the tiles of gate and up read once each, the second time from L2); 1 written, and 1 for the transposed copy.
// Determinism: every element has one writer; amax is a maximum; column sums have a fixed order (cast.h).
template <typename T, Format kFormat, typename Source, Tiling kTiling>
__global__ void __launch_bounds__(kThreads, 2)
    fp8_activation_cast_kernel(const ActivationArguments work, const Cast cast, const ColumnSums sums,
                               const bool in_cluster) {
    wait_for_kernel_before();
    __shared__ Shared<Source::kExtra, kTiling> shared;
    const auto index = static_cast<int>(blockIdx.x);
    const Corner corner(cast, index, kTiling, in_cluster);
    const Position position = position_in<kTiling>(corner);
    Source source(work, position);
    read_tile<T, kFormat, true>(source, cast, sums, position, shared);
    __syncthreads();
    write_tile(cast, corner, index, shared);
    if constexpr (has_sums(Source::kExtra)) {
        end_sums<kTiling>(corner, cast.rows, cast.columns, in_cluster, TileSums<kTiling>{sums, shared.sums});
    }
}

// Calls function.operator()<T, Source>() with where elements come from.
template <typename Function>
void with_source(const ActivationArguments& work, const Function& function) {
    const auto of_dtype = [&]<typename T>() {
        if (work.is_backward && work.is_gated) {
            function.template operator()<T, ActivationBackwardSource<T, true>>();
        } else if (work.is_backward) {
            function.template operator()<T, ActivationBackwardSource<T, false>>();
        } else if (work.is_gated) {
            function.template operator()<T, ActivationSource<T, true>>();
        } else {
            function.template operator()<T, ActivationSource<T, false>>();
        }
    };
    with_dtype(work.dtype, of_dtype);
}

}  // namespace

cudaError_t launch_activation_cast(const ActivationArguments& work, const Cast& cast, const ColumnSums& sums,
                                   cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    with_source(work, [&]<typename T, typename Source>() {
        with_format(cast.format, [&]<Format kFormat>() {
            error = with_tiling(cast, [&]<Tiling kTiling>() {
                constexpr auto kKernel = fp8_activation_cast_kernel<T, kFormat, Source, kTiling>;
                return launch_with_sums<kKernel, kTiling>(cast, {sums}, {}, stream, work, cast, sums);
            });
        });
    });
    return error;
}

cudaError_t launch_activation_current_scale(const ActivationArguments& work, const CurrentScale& scale,
                                            cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    with_source(work, [&]<typename T, typename Source>() {
        error = launch_current_scale_of<Source>(work, work.rows, columns_made(work), scale, stream);
    });
    return error;
}

}  // namespace te_graph::fp8
