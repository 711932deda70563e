#include "multi_tensor/tensor_entries.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "common/arguments_apart.h"
#include "common/check.h"
#include "multi_tensor/check_distinct.h"

namespace te_graph::multi_tensor {
namespace {

// tensor: [...].
bool is_dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

// The kernels' name of `dtype`; a TypeError for dtypes that they do not know.
DType dtype_of(const char* op, const char* argument, at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat:
            return DType::kFloat32;
        case at::kDouble:
            return DType::kFloat64;
        case at::kHalf:
            return DType::kFloat16;
        case at::kBFloat16:
            return DType::kBFloat16;
        default:
            TORCH_CHECK_TYPE(false, op, ": expected ", argument,
                             " of dtype torch.float32, torch.float64, torch.float16 or torch.bfloat16, got ",
                             dtype_name(dtype));
    }
}

// Raises unless list[i], tensor [...], is a strided tensor on `device` whose elements lie in its memory, one in each
// place.
void check_element(const char* op, const char* argument, size_t i, const at::Tensor& tensor, at::Device device) {
    TORCH_CHECK_VALUE(tensor.defined(), op, ": expected ", argument, "[", i, "] to be a tensor, got None");
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": expected ", argument, "[", i, "] of layout Strided, got ",
                     tensor.layout());
    TORCH_CHECK_VALUE(tensor.device() == device, op, ": expected ", argument, "[", i, "] on ", device, ", got ",
                      tensor.device());
    TORCH_CHECK_VALUE(!tensor.key_set().has_any(kDeferred), op, ": expected ", argument, "[", i,
                      "] that is materialized, got one that is negated or conjugated lazily; use resolve_neg()");
    check_elements_apart(op, argument, tensor, i);
}

// Which tensors an op takes as they are: those on its device and, of what is written outside of inference mode, those
// that were not made in it, since they have no version counter that could show the write.
class Fitness {
public:
    Fitness(const char* op, at::Device device, bool is_written)
        : op_(op), device_(device), allows_inference_(!is_written || c10::InferenceMode::is_enabled()) {}

    // Raises if list[i], tensor [...], is none. What nearly all are like is seen in few loads.
    void check(const char* list, size_t i, const at::Tensor& tensor) const {
        const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
        const c10::DispatchKeySet keys = impl->key_set();
        const bool is_ordinary = impl->layout() == at::kStrided && impl->device() == device_ &&
                                 impl->is_non_overlapping_and_dense() && !keys.has_any(kDeferred) &&
                                 (allows_inference_ || keys.has(c10::DispatchKey::ADInplaceOrView));
        if (is_ordinary) return;
        check_element(op_, list, i, tensor, device_);
        TORCH_CHECK(allows_inference_ || !tensor.is_inference(), op_, ": expected ", list, "[", i,
                    "] made outside of inference mode, got an inference tensor; clone() it, or write it in that mode");
    }

private:
    const char* op_;
    at::Device device_;
    bool allows_inference_;
};

}  // namespace

TensorEntries::TensorEntries(const char* op, at::TensorList tensors, bool is_written)
    : device_(tensors.empty() ? at::Device(at::kCPU) : tensors[0].device()) {
    if (is_written) written_[0] = tensors;
    const Fitness fitness(op, device_, is_written);
    for (size_t i = 0; i < tensors.size(); ++i) fitness.check("tensors", i, tensors[i]);
    if (is_written) check_distinct(op, tensors, {});
    entries_.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
        const at::Tensor& tensor = tensors[i];
        const DType dtype = dtype_of(op, "tensors", tensor.scalar_type());
        has_double_ |= dtype == DType::kFloat64;
        void* data = nullptr;
        if (!is_dense(tensor)) {
            data = dense(tensor, i, is_written).mutable_data_ptr();
        } else {
            data = is_written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
        }
        entries_.push_back({nullptr, data, tensor.numel(), dtype, dtype, Mode::kAdd, {}});
    }
}

TensorEntries::TensorEntries(const char* op, at::TensorList destinations, at::TensorList sources,
                             bool sources_are_written)
    : device_(destinations[0].device()) {
    TORCH_CHECK_VALUE(destinations.size() == sources.size(), op, ": expected as many sources as destinations, ",
                      destinations.size(), ", got ", sources.size());
    const Fitness destination_fitness(op, device_, true), source_fitness(op, device_, sources_are_written);
    for (size_t i = 0; i < destinations.size(); ++i) {
        destination_fitness.check("destination", i, destinations[i]);
        source_fitness.check("source", i, sources[i]);
    }
    written_[0] = destinations;
    check_distinct(op, destinations, sources);
    if (sources_are_written) {
        written_[1] = sources;
        check_distinct(op, sources, {});
    }
    entries_.reserve(destinations.size());
    for (size_t i = 0; i < destinations.size(); ++i) {
        const at::Tensor &destination = destinations[i], &source = sources[i];
        const bool are_flat = destination.is_contiguous() && source.is_contiguous();
        TORCH_CHECK_VALUE(are_flat ? destination.numel() == source.numel() : destination.sizes() == source.sizes(), op,
                          ": expected source[", i, "] of shape ", destination.sizes(), ", got ", source.sizes());
        const DType to = dtype_of(op, "destination", destination.scalar_type());
        has_double_ |= to == DType::kFloat64;
        const at::Tensor written = is_dense(destination) ? destination : dense(destination, i, true);
        const at::Tensor read = are_flat || (is_dense(source) && source.strides() == written.strides())
                                    ? source
                                    : like(source, written, i, sources_are_written);
        const void* const from = sources_are_written ? read.mutable_data_ptr() : read.const_data_ptr();
        entries_.push_back({from,
                            written.mutable_data_ptr(),
                            destination.numel(),
                            dtype_of(op, "source", source.scalar_type()),
                            to,
                            Mode::kAdd,
                            {}});
    }
}

at::Tensor TensorEntries::dense(const at::Tensor& tensor, size_t i, bool is_written) {
    copies_.push_back({tensor.contiguous(), is_written ? std::optional(tensor) : std::nullopt, "tensor", i});
    return copies_.back().tensor;
}

at::Tensor TensorEntries::like(const at::Tensor& source, const at::Tensor& destination, size_t i, bool is_written) {
    at::Tensor copy = at::empty_strided(destination.sizes(), destination.strides(), source.options());
    copy.copy_(source);
    copies_.push_back({copy, is_written ? std::optional(source) : std::nullopt, "source", i});
    return copy;
}

void TensorEntries::finish() {
    for (const Copy& copy : copies_) {
        if (copy.target) copy.target->copy_(copy.tensor);
    }
    for (const at::TensorList list : written_) {
        for (const at::Tensor& tensor : list) tensor.unsafeGetTensorImpl()->bump_version();
    }
}

}  // namespace te_graph::multi_tensor
