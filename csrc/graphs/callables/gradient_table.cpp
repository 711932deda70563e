#include "graphs/callables/gradient_table.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <cstring>

#include "common/dtype_name.h"

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace te_graph::graphs {

using multi_tensor::Chunk;
using multi_tensor::Mode;
using multi_tensor::TableEntry;

namespace {

std::optional<ElementType> find_element_type(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat:
            return ElementType{DType::kFloat32, 1};
        case at::kDouble:
            return ElementType{DType::kFloat64, 1};
        case at::kHalf:
            return ElementType{DType::kFloat16, 1};
        case at::kBFloat16:
            return ElementType{DType::kBFloat16, 1};
        case at::kComplexFloat:
            return ElementType{DType::kFloat32, 2};
        case at::kComplexDouble:
            return ElementType{DType::kFloat64, 2};
        default:
            return std::nullopt;
    }
}

}  // namespace

ElementType element_type(at::ScalarType dtype) {
    const auto found = find_element_type(dtype);
    TORCH_CHECK_TYPE(found, "te_graph: gradients of dtype ", dtype_name(dtype),
                     " cannot be accumulated in a graph; pass accumulate_grads=False");
    return *found;
}

bool GradientTable::takes(at::ScalarType source, at::ScalarType destination) {
    const auto from = find_element_type(source), to = find_element_type(destination);
    return from && to && from->count == to->count && multi_tensor::is_supported(from->dtype, to->dtype);
}

bool is_dense(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense() && !tensor.is_conj() &&
           !tensor.is_neg();
}

at::Tensor lay_out(const at::Tensor& grad, const at::Tensor& parameter, const at::Tensor& main_grad) {
    const at::Tensor& like = main_grad.defined() && is_dense(main_grad) ? main_grad : parameter;
    const bool is_conjugate = grad.is_conj() || grad.is_neg();
    if (!is_conjugate && torch::autograd::utils::obeys_layout_contract(grad, like)) return grad;
    const at::Tensor copy = like.is_non_overlapping_and_dense()
                                ? at::empty_strided(grad.sizes(), like.strides(), grad.options())
                                : at::empty(grad.sizes(), grad.options());
    return copy.copy_(grad);
}

GradientTable::GradientTable(const std::vector<int64_t>& sizes, const std::vector<at::ScalarType>& source_dtypes,
                             const std::vector<at::ScalarType>& destination_dtypes, at::Device device) {
    const size_t count = sizes.size();
    std::vector<int64_t> numels;
    for (size_t i = 0; i < count; ++i) {
        const auto [source, elements] = element_type(source_dtypes[i]);
        const DType destination = element_type(destination_dtypes[i]).dtype;
        TORCH_CHECK_TYPE(multi_tensor::is_supported(source, destination), "te_graph: gradients of dtype ",
                         dtype_name(source_dtypes[i]), " cannot be accumulated into ",
                         dtype_name(destination_dtypes[i]));
        numels.push_back(sizes[i] * elements);
        current_.push_back({nullptr, nullptr, numels.back(), source, destination, Mode::kSkip, {}});
    }
    is_changed_.resize(count);
    const std::vector<Chunk> chunks = multi_tensor::make_chunks(numels);
    const auto on_cpu = at::TensorOptions().device(at::kCPU);
    entries_ = at::zeros({static_cast<int64_t>(count), 4}, at::TensorOptions().device(device).dtype(at::kLong));
    at::Tensor host_chunks = at::empty({static_cast<int64_t>(chunks.size()), 2}, on_cpu.dtype(at::kInt));
    if (!chunks.empty()) {
        std::memcpy(host_chunks.mutable_data_ptr(), chunks.data(), chunks.size() * sizeof(Chunk));
    }
    chunks_ = host_chunks.to(device);
}

void GradientTable::bind(const std::vector<at::Tensor>& sources) {
    TORCH_CHECK_VALUE(sources.size() == current_.size(), "te_graph: expected ", current_.size(), " gradients, got ",
                      sources.size());
    at::Tensor host = at::empty_like(entries_, at::TensorOptions().device(at::kCPU));
    for (size_t i = 0; i < current_.size(); ++i) {
        if (current_[i].numel == 0) continue;
        const at::Tensor& source = sources[i];
        const auto [dtype, count] = element_type(source.scalar_type());
        TORCH_CHECK_VALUE(is_dense(source) && source.numel() * count == current_[i].numel &&
                              dtype == current_[i].source_dtype && source.device() == entries_.device(),
                          "te_graph: expected gradient ", i, " to be dense, with ", current_[i].numel / count,
                          " elements on ", entries_.device(), ", got ", source.toString(), " of shape ", source.sizes(),
                          " and strides ", source.strides(), " on ", source.device());
        current_[i].source = source.const_data_ptr();
    }
    if (!current_.empty()) std::memcpy(host.mutable_data_ptr(), current_.data(), current_.size() * sizeof(TableEntry));
    entries_.copy_(host);
}

void GradientTable::set(size_t index, EntryWrite write) {
    if (!differs(index, write)) return;
    TableEntry& entry = current_[index];
    entry.mode = write.mode;
    if (write.mode != Mode::kSkip) entry.destination = write.destination;
    if (is_changed_[index]) return;
    is_changed_[index] = true;
    changed_.push_back(index);
}

void GradientTable::upload() {
    if (changed_.empty()) return;
    ++uploads_;
    std::vector<multi_tensor::EntryUpdate> updates;
    updates.reserve(changed_.size());
    for (const size_t index : changed_) {
        updates.push_back(
            {nullptr, current_[index].destination, static_cast<int32_t>(index), current_[index].mode, false});
        is_changed_[index] = false;
    }
    changed_.clear();
    auto* const table = static_cast<TableEntry*>(entries_.mutable_data_ptr());
    const auto count = static_cast<int64_t>(updates.size());
    if (entries_.is_cpu()) {
        multi_tensor::update_entries_cpu(table, updates.data(), count);
    } else {
#ifdef TE_GRAPH_CUDA
        C10_CUDA_CHECK(multi_tensor::launch_update_entries(table, updates.data(), count,
                                                           c10::cuda::getCurrentCUDAStream(entries_.get_device())));
#endif
    }
}

}  // namespace te_graph::graphs
