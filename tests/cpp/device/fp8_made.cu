// Kernels of activations and layer norms that are cast where they are made, against the CPU loops: bit for bit where
// both compute alike, that is for all but erf, tanh and exp.
#include <cmath>
#include <random>

#include "device_memory.h"
#include "fp8/activation_cast.h"
#include "fp8/layer_norm.h"
#include "fp8_cases.h"

namespace te_graph::fp8 {
namespace {

using multi_tensor::check;
using multi_tensor::DeviceTensor;

constexpr Shape kMadeShapes[] = {{1, 8},     {8, 16}, {17, 264},    {129, 136}, {3, 4104},
                                 {256, 384}, {0, 16}, {1665, 1288}, {136, 8456}};

// Tensors of the host, and their copies on the device: what both sides write is compared.
class Twins {
public:
    GuardedTensor& add(GuardedTensor tensor) {
        hosts_.push_back(std::make_unique<GuardedTensor>(std::move(tensor)));
        return *hosts_.back();
    }
    GuardedTensor& random(DType dtype, int64_t numel, std::mt19937_64& generator) {
        GuardedTensor tensor(dtype, numel, 0);
        for (int64_t i = 0; i < numel; ++i) tensor.set(i, random_bits(dtype, Values::kFinite, generator));
        return add(std::move(tensor));
    }
    GuardedTensor& empty(DType dtype, int64_t numel) { return add(GuardedTensor(dtype, numel, 0)); }
    // Once all are there.
    void upload() {
        for (const auto& host : hosts_) devices_.push_back(std::make_unique<DeviceTensor>(*host));
    }
    void* on_device(const GuardedTensor& host) const {
        for (size_t i = 0; i < hosts_.size(); ++i) {
            if (hosts_[i].get() == &host) return devices_[i]->data();
        }
        return nullptr;
    }
    void expect_equal() const {
        for (size_t i = 0; i < hosts_.size(); ++i) {
            EXPECT_TRUE(same_numbers(devices_[i]->download(*hosts_[i]), *hosts_[i])) << "tensor " << i;
        }
    }

private:
    std::vector<std::unique_ptr<GuardedTensor>> hosts_;
    std::vector<std::unique_ptr<DeviceTensor>> devices_;
};

// Where a cast [rows, columns] goes, with column sums. Bytes lie in tensors of fp32, poison behind them.
struct Outputs {
    GuardedTensor &out, &out_t, &scalars, &sums;  // scalars: scale, scale_inv, amax
    Outputs(Twins& twins, Shape shape, DType dtype)
        : out(twins.empty(DType::kFloat32, (shape.rows * shape.columns + 3) / 4)),
          out_t(twins.empty(DType::kFloat32, (padded(shape.rows) * shape.columns + 3) / 4)),
          scalars(twins.empty(DType::kFloat32, 3)),
          sums(twins.empty(dtype, shape.columns)) {
        const float values[] = {0.37f, 0, 0};
        std::memcpy(scalars.data(), values, sizeof(values));
    }
    template <typename Address>
    Cast cast(Shape shape, DType dtype, Format format, const Address& address) const {
        auto* const numbers = static_cast<float*>(address(scalars));
        return {.input = nullptr,
                .out = static_cast<uint8_t*>(address(out)),
                .out_t = static_cast<uint8_t*>(address(out_t)),
                .scale = numbers,
                .scale_inv = numbers + 1,
                .amax = numbers + 2,
                .counts = nullptr,
                .rows = shape.rows,
                .columns = shape.columns,
                .dtype = dtype,
                .format = format,
                .pads_out_t = true,
                .reserved = {}};
    }
};

template <typename Function>
void on_both(const Twins& twins, const Function& function) {
    function([](GuardedTensor& tensor) { return tensor.data(); }, false);
    function([&](GuardedTensor& tensor) { return twins.on_device(tensor); }, true);
}

TEST(Fp8MadeDevice, ActivationsHaveTheBytesOfTheCpuLoops) {
    auto generator = seeded_generator();
    for (const Shape shape : kMadeShapes) {
        for (const DType dtype : kInputs) {
            for (const bool is_gated : {false, true}) {
                for (const bool is_backward : {false, true}) {
                    const Format format = kFormats[generator() % 2];
                    const int64_t numel = shape.rows * shape.columns, halves = is_gated ? 2 : 1;
                    const Shape made{shape.rows, shape.columns * (is_backward ? halves : 1)};
                    Twins twins;
                    GuardedTensor& x = twins.random(dtype, numel * halves, generator);
                    GuardedTensor& grad = twins.random(dtype, numel, generator);
                    const Outputs outputs(twins, made, dtype);
                    twins.upload();
                    const multi_tensor::Buffer scratch(tiles_in(made.rows) * made.columns * sizeof(float));
                    on_both(twins, [&](const auto& address, bool on_device) {
                        const ActivationArguments work{.x = address(x),
                                                       .grad = address(grad),
                                                       .rows = shape.rows,
                                                       .columns = shape.columns,
                                                       .dtype = dtype,
                                                       .activation = Activation::kRelu,
                                                       .is_gated = is_gated,
                                                       .is_backward = is_backward};
                        const Cast cast = outputs.cast(made, dtype, format, address);
                        ColumnSums sums;
                        if (is_backward) {
                            sums = {address(outputs.sums), dtype, reinterpret_cast<float*>(scratch.at(0)), false};
                        }
                        if (on_device) {
                            check(launch_activation_cast(work, cast, sums, nullptr));
                        } else {
                            activation_cast_cpu(work, cast, sums);
                        }
                    });
                    twins.expect_equal();
                }
            }
        }
    }
}

TEST(Fp8MadeDevice, LayerNormsHaveTheBytesOfTheCpuLoops) {
    auto generator = seeded_generator();
    for (const Shape shape : kMadeShapes) {
        for (const DType dtype : kInputs) {
            for (const bool rms_norm : {false, true}) {
                const Format format = kFormats[generator() % 2];
                const DType of_weight = generator() % 2 ? dtype : DType::kFloat32;
                const bool has_residual = generator() % 2, zero_centered = generator() % 2, is_cast = generator() % 4;
                const int64_t numel = shape.rows * shape.columns;
                Twins twins;
                GuardedTensor &x = twins.random(dtype, numel, generator), &dy = twins.random(dtype, numel, generator);
                GuardedTensor& residual = twins.random(dtype, numel, generator);
                GuardedTensor& weight = twins.random(of_weight, shape.columns, generator);
                GuardedTensor& bias = twins.random(of_weight, shape.columns, generator);
                GuardedTensor &sum = twins.empty(dtype, numel), &ds = twins.empty(dtype, numel);
                GuardedTensor& mean = twins.empty(DType::kFloat32, shape.rows);
                GuardedTensor& rstd = twins.empty(DType::kFloat32, shape.rows);
                GuardedTensor& weight_sums = twins.empty(of_weight, shape.columns);
                GuardedTensor& bias_sums = twins.empty(of_weight, shape.columns);
                const Outputs of_y(twins, shape, dtype), of_ds(twins, shape, dtype);
                twins.upload();
                const int64_t partial = tiles_in(shape.rows) * shape.columns;
                const multi_tensor::Buffer scratch((3 * partial + 2 * shape.rows) * sizeof(float));
                on_both(twins, [&](const auto& address, bool on_device) {
                    auto* const floats = reinterpret_cast<float*>(scratch.at(0));
                    const LayerNormStats stats{.x = address(x),
                                               .residual = has_residual ? address(residual) : nullptr,
                                               .sum = has_residual ? address(sum) : nullptr,
                                               .mean = rms_norm ? nullptr : static_cast<float*>(address(mean)),
                                               .rstd = static_cast<float*>(address(rstd)),
                                               .rows = shape.rows,
                                               .columns = shape.columns,
                                               .dtype = dtype,
                                               .eps = 1e-5f};
                    const LayerNorm norm{.sum = has_residual ? stats.sum : stats.x,
                                         .weight = address(weight),
                                         .bias = address(bias),
                                         .mean = stats.mean,
                                         .rstd = stats.rstd,
                                         .rows = shape.rows,
                                         .columns = shape.columns,
                                         .dtype = dtype,
                                         .weight_dtype = of_weight,
                                         .zero_centered = zero_centered};
                    const LayerNormBackward backward{
                        .norm = norm,
                        .grad = address(dy),
                        .grad_sum = has_residual ? address(residual) : nullptr,
                        .grad_x = address(ds),
                        .row_sums = floats + 3 * partial,
                        .weight_sums = {address(weight_sums), of_weight, floats, false},
                        .bias_sums = {address(bias_sums), of_weight, floats + partial, false},
                        .is_cast = is_cast};
                    const Cast cast = of_y.cast(shape, dtype, format, address);
                    const Cast backward_cast = of_ds.cast(shape, dtype, format, address);
                    ColumnSums sums{address(of_ds.sums), dtype, floats + 2 * partial, false};
                    if (!is_cast) sums = {};
                    if (on_device) {
                        check(launch_layer_norm_stats(stats, nullptr));
                        check(launch_layer_norm_cast(norm, cast, nullptr));
                        check(launch_layer_norm_backward(backward, backward_cast, sums, nullptr));
                    } else {
                        layer_norm_stats_cpu(stats);
                        layer_norm_cast_cpu(norm, cast);
                        layer_norm_backward_cpu(backward, backward_cast, sums);
                    }
                });
                twins.expect_equal();
            }
        }
    }
}

}  // namespace
}  // namespace te_graph::fp8
