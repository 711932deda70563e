#include "graphs/guards/settings.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "graphs/guards/dict_watch.h"

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

// NONE means that nothing was chosen; the kernels then compute as for IEEE.
at::Float32Precision precision(const at::Context& context, c10::DeviceType device, at::Float32Op op) {
    const auto backend = device == at::kCUDA ? at::Float32Backend::CUDA : at::Float32Backend::MKLDNN;
    const auto chosen = context.float32Precision(backend, op);
    return chosen == at::Float32Precision::NONE ? at::Float32Precision::IEEE : chosen;
}

// 0 when off, else which dtype, counted from 1.
int32_t autocast(c10::DeviceType device) {
    return at::autocast::is_autocast_enabled(device)
               ? 1 + static_cast<int32_t>(at::autocast::get_autocast_dtype(device))
               : 0;
}

int32_t packed(const std::array<at::SDPBackend, at::num_sdp_backends>& order) {
    int32_t digits = 0;
    for (const at::SDPBackend backend : order) digits = digits * 8 + static_cast<int32_t>(backend) + 1;
    return digits;
}

// Variables of Python modules, by the hashes of their values; the modules live as long as torch does. Their
// dictionaries hardly ever change, which a watch tells where there are watches.
class Variables {
public:
    // `function` is one of the module, and knows its variables.
    void add(const char* module, const char* function, const char* name) {
        const py::object members = py::module_::import(module).attr(function).attr("__globals__");
        is_watched_ = is_watched_ && watch_dict(members.ptr());
        variables_.push_back({py::object(members).release().ptr(), PyUnicode_InternFromString(name)});
        values_.push_back(0);
    }
    const std::vector<int32_t>& read() {
        if (is_watched_ && changes_ == dict_changes()) return values_;
        changes_ = dict_changes();
        for (size_t i = 0; i < values_.size(); ++i) {
            PyObject* const value = PyDict_GetItemWithError(variables_[i].first, variables_[i].second);
            const Py_hash_t hash = value ? PyObject_Hash(value) : 0;
            if (PyErr_Occurred()) PyErr_Clear();
            values_[i] = static_cast<int32_t>(hash ^ (hash >> 32));
        }
        return values_;
    }
    // An import may let other threads run: those that come here then wait for it without the GIL.
    static Variables& of_torch() {
        PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Variables> variables;
        const auto find = [] {
            Variables found;
            found.add("torch.backends.mha", "get_fastpath_enabled", "_is_fastpath_enabled");
            found.add("torch.backends.opt_einsum", "_get_enabled", "enabled");
            found.add("torch.backends.opt_einsum", "_get_strategy", "strategy");
            found.add("torch.utils._device", "set_device", "CURRENT_DEVICE");
            return found;
        };
        return variables.call_once_and_store_result(find).get_stored();
    }

private:
    std::vector<std::pair<PyObject*, PyObject*>> variables_;  // dictionary and name
    std::vector<int32_t> values_;
    bool is_watched_ = true;
    uint64_t changes_ = ~uint64_t{0};
};

// What `with torch.device(...)` has chosen, which is a mode of torch functions and no variable; 0 when nothing.
int32_t device_of_modes() {
    Py_hash_t hash = 0;
    for (int64_t i = 0; i < at::impl::PythonTorchFunctionTLS::stack_len(); ++i) {
        const py::handle mode = at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter());
        const py::object device = py::getattr(mode, "device", py::none());
        if (THPDevice_Check(device.ptr())) hash = hash * 31 + py::hash(device) + 1;
    }
    return static_cast<int32_t>(hash ^ (hash >> 32));
}

// As (what messages call it, its value as a number). Autocast comes first and says more than that it changed.
#define TE_GRAPH_SETTINGS(X)                                                                                   \
    X("autocast", autocast(device))                                                                            \
    X("autocast of other devices", autocast(device == at::kCUDA ? at::kCPU : at::kCUDA))                       \
    X("the cache of autocast", choice.with_autocast_cache ? at::autocast::is_autocast_cache_enabled() : 0)     \
    X("the dtype of autocast (torch.set_autocast_dtype)",                                                      \
      choice.with_autocast_dtype ? static_cast<int32_t>(at::autocast::get_autocast_dtype(device)) : 0)         \
    X("the grad mode", choice.with_modes ? at::GradMode::is_enabled() : 0)                                     \
    X("the default dtype (torch.set_default_dtype)", c10::get_default_dtype_as_scalartype())                   \
    X("torch.use_deterministic_algorithms", context.deterministicAlgorithms())                                 \
    X("warn_only of torch.use_deterministic_algorithms", context.deterministicAlgorithmsWarnOnly())            \
    X("the float32 precision of matrix products (TF32)", precision(context, device, at::Float32Op::MATMUL))    \
    X("the float32 precision of convolutions (TF32)", precision(context, device, at::Float32Op::CONV))         \
    X("the float32 precision of recurrent networks (TF32)", precision(context, device, at::Float32Op::RNN))    \
    X("torch.backends.cudnn.enabled", context.userEnabledCuDNN())                                              \
    X("torch.backends.cudnn.deterministic", context.deterministicCuDNN())                                      \
    X("torch.backends.cudnn.benchmark", context.benchmarkCuDNN())                                              \
    X("torch.backends.cudnn.benchmark_limit", context.benchmarkLimitCuDNN())                                   \
    X("torch.backends.miopen.immediate", context.immediateMiopen())                                            \
    X("torch.backends.mkldnn.enabled", context.userEnabledMkldnn())                                            \
    X("torch.backends.mkldnn.deterministic", context.deterministicMkldnn())                                    \
    X("torch.backends.nnpack", context.userEnabledNNPACK())                                                    \
    X("torch.backends.quantized.engine", context.qEngine())                                                    \
    X("torch.backends.cuda.enable_flash_sdp", context.userEnabledFlashSDP())                                   \
    X("FlashAttention 3 of scaled_dot_product_attention", context.userEnabledFA3SDP())                         \
    X("torch.backends.cuda.enable_mem_efficient_sdp", context.userEnabledMemEfficientSDP())                    \
    X("torch.backends.cuda.enable_math_sdp", context.userEnabledMathSDP())                                     \
    X("torch.backends.cuda.enable_cudnn_sdp", context.userEnabledCuDNNSDP())                                   \
    X("the overrideable backend of scaled_dot_product_attention", context.userEnabledOverrideableSDP())        \
    X("the priority of the backends of scaled_dot_product_attention", packed(context.sDPPriorityOrder()))      \
    X("torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp", context.allowFP16BF16ReductionMathSDP())       \
    X("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction", context.allowFP16ReductionCuBLAS()) \
    X("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction", context.allowBF16ReductionCuBLAS()) \
    X("torch.backends.cuda.matmul.allow_fp16_accumulation", context.allowFP16AccumulationCuBLAS())             \
    X("the reduced precision of float16 reductions on the CPU", context.allowFP16ReductionCPU())               \
    X("the multiprocessors set aside (sm_carveout)", context._SMCarveout_EXPERIMENTAL().value_or(-1))          \
    X("torch.backends.cuda.preferred_blas_library", context.blasPreferredBackend())                            \
    X("torch.backends.cuda.preferred_linalg_library", context.linalgPreferredBackend())                        \
    X("torch.backends.cuda.preferred_rocm_fa_library", context.getROCmFAPreferredBackend())                    \
    X("torch.backends.mha.set_fastpath_enabled", variables[0])                                                 \
    X("torch.backends.opt_einsum.enabled", variables[1])                                                       \
    X("torch.backends.opt_einsum.strategy", variables[2])                                                      \
    X("the default device (torch.set_default_device)", variables[3])                                           \
    X("the default device (with torch.device(...))", choice.with_modes ? device_of_modes() : 0)

#define TE_GRAPH_NAME(name, value) name,
#define TE_GRAPH_VALUE(name, value) static_cast<int32_t>(value),

constexpr const char* kNames[] = {TE_GRAPH_SETTINGS(TE_GRAPH_NAME)};

}  // namespace

Settings::Settings(c10::DeviceType device, Choice choice)
    : device_(device), choice_(choice), values_(read(device, choice)) {}

Settings::Values Settings::read(c10::DeviceType device, Choice choice) {
    const std::vector<int32_t>& variables = Variables::of_torch().read();
    at::Context& context = at::globalContext();
    return {TE_GRAPH_SETTINGS(TE_GRAPH_VALUE)};
}

std::string Settings::change() const {
    static_assert(std::size(kNames) == kCount);
    const Values now = read(device_, choice_);
    if (values_ == now) return {};
    const auto changed = std::mismatch(values_.begin(), values_.end(), now.begin());
    const std::string name = kNames[changed.first - values_.begin()];
    const bool is_autocast = name.rfind("autocast", 0) == 0;
    if (is_autocast && *changed.first != 0 && *changed.second != 0) return "the dtype of " + name + " changed";
    if (is_autocast) {
        return name + (*changed.second != 0 ? " is now on" : " is now off") + " (capture under the autocast of calls)";
    }
    return name + " changed";
}

#undef TE_GRAPH_NAME
#undef TE_GRAPH_VALUE
#undef TE_GRAPH_SETTINGS

}  // namespace te_graph::graphs
