// Registration of the ops that compute scales.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "common/run_on.h"
#include "fp8/arguments.h"
#include "fp8/scale.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kUpdate = "amax_and_scale_update_inplace";
constexpr const char* kUpdateScalar = "amax_and_scale_update_inplace.Scalar";

const KernelRegistration amax_and_scale_update({
    .name = "amax_and_scale_update",
    .op = "te_graph.amax_and_scale_update_inplace.Scalar",
#ifdef TE_GRAPH_CUDA
    .functions = amax_and_scale_update_kernels(),
#else
    .functions = {},
#endif
    // Its place among the parameters of amax_and_scale_update_kernel.
    .arguments = {{"update_weight_scale_inv", 9, KernelInfo::Argument::kBool}},
});

constexpr const char* kCurrent = "fp8_current_scale";
constexpr const char* kScale = "fp8_scale";

float scaled_max_of(const char* op, float largest, double margin) {
    TORCH_CHECK_VALUE(std::isfinite(margin), op, ": expected margin to be finite, got ", margin);
    return largest * static_cast<float>(std::pow(2.0, -margin));
}

// All but the flag.
Update update_of(const at::Tensor& amax_history,     // [H, n]
                 const at::Tensor& scale,            // [n]
                 const at::Tensor& scale_inv,        // [n]
                 const at::Tensor& non_weight_mask,  // [n] or [0]
                 double fp8_max, double margin, const std::string& amax_compute_algo, bool skip_nonfinite) {
    check_strided(kUpdate, "amax_history", amax_history);
    check_dtype(kUpdate, "amax_history", amax_history, at::kFloat);
    TORCH_CHECK_VALUE(amax_history.dim() == 2 && amax_history.size(0) >= 1, kUpdate,
                      ": expected amax_history of shape [H, n] with H >= 1, got ", amax_history.sizes());
    TORCH_CHECK_VALUE(amax_history.size(0) <= INT32_MAX / 2 && amax_history.size(1) <= INT32_MAX / 2, kUpdate,
                      ": expected amax_history of at most ", INT32_MAX / 2, " rows and columns, got ",
                      amax_history.sizes());
    TORCH_CHECK_VALUE(fp8_max > 0 && std::isfinite(fp8_max), kUpdate, ": expected fp8_max to be positive, got ",
                      fp8_max);
    TORCH_CHECK_VALUE(amax_compute_algo == "max" || amax_compute_algo == "most_recent", kUpdate,
                      ": expected amax_compute_algo to be 'max' or 'most_recent', got '", amax_compute_algo, "'");
    check_elements_apart(kUpdate, "amax_history", amax_history);
    const at::Device device = amax_history.device();
    const int64_t n = amax_history.size(1);
    check_strided(kUpdate, "non_weight_mask", non_weight_mask);
    check_dtype(kUpdate, "non_weight_mask", non_weight_mask, at::kBool);
    Update update{.history = static_cast<float*>(amax_history.data_ptr()),
                  .row_stride = amax_history.stride(0),
                  .column_stride = amax_history.stride(1),
                  .height = static_cast<int>(amax_history.size(0)),
                  .columns = static_cast<int>(n),
                  .scale = strided_of<float>(kUpdate, "scale", scale, n, at::kFloat, device),
                  .scale_inv = strided_of<float>(kUpdate, "scale_inv", scale_inv, n, at::kFloat, device),
                  .mask = {nullptr, 0},
                  .flag = {},
                  .update_weight_scale_inv = false,
                  .scaled_max = scaled_max_of(kUpdate, static_cast<float>(fp8_max), margin),
                  .most_recent = amax_compute_algo == "most_recent",
                  .skip_nonfinite = skip_nonfinite};
    if (!(non_weight_mask.dim() == 1 && non_weight_mask.size(0) == 0)) {
        update.mask = strided_of<const bool>(kUpdate, "non_weight_mask", non_weight_mask, n, at::kBool, device);
    }
    return update;
}

void run_update(const Update& update, const at::Tensor& amax_history,  // [H, n]
                const at::Tensor& scale,                               // [n]
                const at::Tensor& scale_inv,                           // [n]
                const at::Tensor& non_weight_mask,                     // [n] or [0]
                const std::optional<at::Tensor>& flag)                 // [] or [1]
{
    check_apart(kUpdate, {{"amax_history", amax_history, true},
                          {"scale", scale, true},
                          {"scale_inv", scale_inv, true},
                          {"non_weight_mask", non_weight_mask, false},
                          {"update_weight_scale_inv", flag, false}});
    TE_GRAPH_RUN(amax_history.device(), amax_and_scale_update, update);
    note_writes({amax_history, scale, scale_inv});
}

void update_by_tensor(const at::Tensor& amax_history,             // [H, n]
                      const at::Tensor& scale,                    // [n]
                      const at::Tensor& scale_inv,                // [n]
                      const at::Tensor& non_weight_mask,          // [n] or [0]
                      const at::Tensor& update_weight_scale_inv,  // [] or [1]
                      double fp8_max, double margin, const std::string& amax_compute_algo, bool skip_nonfinite) {
    Update update =
        update_of(amax_history, scale, scale_inv, non_weight_mask, fp8_max, margin, amax_compute_algo, skip_nonfinite);
    update.flag = flag_of(kUpdate, "update_weight_scale_inv", update_weight_scale_inv, amax_history.device());
    run_update(update, amax_history, scale, scale_inv, non_weight_mask, update_weight_scale_inv);
}

void update_by_number(const at::Tensor& amax_history,     // [H, n]
                      const at::Tensor& scale,            // [n]
                      const at::Tensor& scale_inv,        // [n]
                      const at::Tensor& non_weight_mask,  // [n] or [0]
                      bool update_weight_scale_inv, double fp8_max, double margin, const std::string& amax_compute_algo,
                      bool skip_nonfinite) {
    Update update =
        update_of(amax_history, scale, scale_inv, non_weight_mask, fp8_max, margin, amax_compute_algo, skip_nonfinite);
    update.update_weight_scale_inv = update_weight_scale_inv;
    run_update(update, amax_history, scale, scale_inv, non_weight_mask, std::nullopt);
}

ScaleRule rule_of(const char* op, at::ScalarType dtype, double margin, double eps, bool power_of_2) {
    TORCH_CHECK_VALUE(eps >= 0, op, ": expected eps to be 0 or positive, got ", eps);
    return {.scaled_max = scaled_max_of(op, max_of(format_of(op, "dtype", dtype)), margin),
            .eps = static_cast<float>(eps),
            .power_of_2 = power_of_2};
}

std::tuple<at::Tensor, at::Tensor> current_scale(const at::Tensor& x,  // [...]
                                                 at::ScalarType dtype, double eps, bool power_of_2) {
    const ScaleRule rule = rule_of(kCurrent, dtype, 0, eps, power_of_2);
    check_strided(kCurrent, "x", x);
    const DType input_dtype = wide_dtype_of(kCurrent, "x", x.scalar_type());
    const at::Tensor input = x.contiguous();
    const auto options = x.options().dtype(at::kFloat);
    const at::Tensor amax = at::empty({1}, options), scale = at::empty({1}, options);
    const at::Tensor state = at::empty({x.device().is_cpu() ? 0 : 2}, options.dtype(at::kInt));
    const CurrentScale work{.input = input.const_data_ptr(),
                            .numel = input.numel(),
                            .dtype = input_dtype,
                            .amax = static_cast<float*>(amax.data_ptr()),
                            .scale = static_cast<float*>(scale.data_ptr()),
                            .state = static_cast<uint32_t*>(state.data_ptr()),
                            .rule = rule};
    TE_GRAPH_RUN(x.device(), current_scale, work);
    return {amax, scale};
}

at::Tensor scale_of_amax(const at::Tensor& amax,  // [...]
                         at::ScalarType dtype, double margin, double eps, bool power_of_2) {
    const ScaleRule rule = rule_of(kScale, dtype, margin, eps, power_of_2);
    check_strided(kScale, "amax", amax);
    check_dtype(kScale, "amax", amax, at::kFloat);
    const at::Tensor input = amax.contiguous();
    const at::Tensor out = at::empty(amax.sizes(), amax.options());
    const auto* const from = static_cast<const float*>(input.const_data_ptr());
    auto* const to = static_cast<float*>(out.data_ptr());
    TE_GRAPH_RUN(amax.device(), scale, from, to, input.numel(), rule);
    return out;
}

// amax_history [H, n]; scale, scale_inv [n]; non_weight_mask [n] or [0].
void update_by_number_meta(const at::Tensor& amax_history, const at::Tensor& scale, const at::Tensor& scale_inv,
                           const at::Tensor& non_weight_mask, bool, double, double, const std::string&, bool) {
    check_devices(kUpdate, amax_history.device(),
                  {{"scale", scale}, {"scale_inv", scale_inv}, {"non_weight_mask", non_weight_mask}});
}
// amax_history [H, n]; scale, scale_inv [n]; non_weight_mask [n] or [0]; update_weight_scale_inv [] or [1].
void update_by_tensor_meta(const at::Tensor& amax_history, const at::Tensor& scale, const at::Tensor& scale_inv,
                           const at::Tensor& non_weight_mask, const at::Tensor& update_weight_scale_inv, double fp8_max,
                           double margin, const std::string& algo, bool skip_nonfinite) {
    check_devices(kUpdate, amax_history.device(), {{"update_weight_scale_inv", update_weight_scale_inv}});
    update_by_number_meta(amax_history, scale, scale_inv, non_weight_mask, false, fp8_max, margin, algo,
                          skip_nonfinite);
}
// x [...] -> [1], [1].
std::tuple<at::Tensor, at::Tensor> current_scale_meta(const at::Tensor& x, at::ScalarType, double, bool) {
    const auto options = x.options().dtype(at::kFloat);
    return {at::empty({1}, options), at::empty({1}, options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kUpdate, update_by_tensor);
    m.impl(kUpdateScalar, update_by_number);
    m.impl(kCurrent, current_scale);
    m.impl(kScale, scale_of_amax);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kUpdate, update_by_tensor_meta);
    m.impl(kUpdateScalar, update_by_number_meta);
    m.impl(kCurrent, current_scale_meta);
    m.impl(kScale, [](const at::Tensor& amax, at::ScalarType, double, double, bool) {
        return at::empty_symint(amax.sym_sizes(), amax.options());
    });
}

TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kUpdate, kUpdateScalar, kCurrent, kScale}) m.impl(name, no_derivative());
}

}  // namespace te_graph::fp8
