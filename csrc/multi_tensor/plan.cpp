#include "multi_tensor/plan.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "common/no_derivative.h"
#include "common/to_device.h"
#include "multi_tensor/arguments.h"
#include "multi_tensor/tensor_entries.h"

namespace te_graph::multi_tensor {
namespace {

// tensors: [...] each.
void check_have_memory(const char* list, const Plan::Tensors& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
        if (has_memory(tensors[i])) continue;  // which spares the name
        check_has_memory(kPlan, std::string(list) + "[" + std::to_string(i) + "]", tensors[i]);
    }
}

// tensors: [...] each.
MemoryRanges ranges_of(const Plan::Tensors& tensors, const std::vector<TableEntry>& entries, bool of_sources) {
    std::vector<const void*> begins;
    std::vector<size_t> sizes;
    for (size_t i = 0; i < tensors.size(); ++i) {
        begins.push_back(of_sources ? entries[i].source : entries[i].destination);
        sizes.push_back(tensors[i].nbytes());
    }
    return {begins, sizes};
}

// tensors: [...] each.
bool has_inference(const Plan::Tensors& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.is_inference(); });
}

// Tells strides from others, sizes being the same: 0 for those of contiguous tensors.
uint32_t strides_of(const c10::TensorImpl& tensor) {
    if (tensor.is_contiguous()) return 0;
    uint64_t hash = 1;
    for (const int64_t stride : tensor.strides()) hash = (hash ^ static_cast<uint64_t>(stride)) * 0x9E3779B97F4A7C15u;
    return static_cast<uint32_t>(hash >> 32) | 1;
}

}  // namespace

Plan::Layout Plan::layout_of(const Tensors& tensors, const Tensors& sources) {
    TORCH_CHECK_VALUE(!tensors.empty(), kPlan, ": expected at least one tensor, got an empty list");
    check_have_memory("tensors", tensors);
    check_have_memory("sources", sources);
    // Tensors made in inference mode may be read anywhere; what writes them outside of it raises by itself.
    const c10::InferenceMode allows_all;
    const TensorEntries entries =
        sources.empty() ? TensorEntries(kPlan, tensors, true) : TensorEntries(kPlan, tensors, sources, true);
    TORCH_CHECK_VALUE(entries.is_direct(), kPlan,
                      ": expected dense tensors without gaps, and sources with the strides of their destinations");
    Layout layout{entries.entries(), ranges_of(tensors, entries.entries(), false),
                  ranges_of(sources, entries.entries(), true), has_inference(tensors) || has_inference(sources)};
    // Exact duplicates are refused with the lists; here, too, views that begin elsewhere in one another.
    if (const auto& pair = layout.written.overlap()) {
        TORCH_CHECK_VALUE(false, kPlan, ": tensors ", pair->first, " and ", pair->second, " overlap");
    }
    if (const auto pair = layout.written.shared_with(layout.read)) {
        TORCH_CHECK_VALUE(false, kPlan, ": tensor ", pair->first, " and source ", pair->second, " overlap");
    }
    return layout;
}

std::vector<Plan::TensorReference> Plan::references_to(const Tensors& tensors) {
    std::vector<TensorReference> references;
    references.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
        const auto storage = tensor.storage().getWeakStorageImpl();
        const c10::StorageImpl* const memory = tensor.storage().unsafeGetStorageImpl();
        references.push_back({decltype(TensorReference::tensor)(tensor.getIntrusivePtr()), storage, memory,
                              memory->data(), tensor.storage_offset(), tensor.numel(),
                              strides_of(*tensor.unsafeGetTensorImpl()), tensor.dtype()});
    }
    return references;
}

Plan::Plan(const Tensors& tensors, const Tensors& sources)
    : layout_(layout_of(tensors, sources)), tensors_(references_to(tensors)), sources_(references_to(sources)) {
    const at::Device device = tensors[0].device();
    std::vector<int64_t> numels;
    for (const TableEntry& entry : layout_.entries) {
        numels.push_back(entry.numel);
        if (entry.destination_dtype == DType::kFloat64) norm_dtype_ = at::kDouble;
        may_accumulate_ &= is_supported(entry.source_dtype, entry.destination_dtype);
    }
    std::vector<Chunk> chunks = make_chunks(numels);
    table_ = to_device(layout_.entries, sizeof(TableEntry) / sizeof(int64_t), at::kLong, device);
    chunks_ = to_device(chunks, 2, at::kInt, device);
    partial_ = at::zeros({kPartialWords}, at::TensorOptions().dtype(at::kLong).device(device));
}

bool Plan::TensorReference::is_unmoved() const {
    const c10::TensorImpl* const now = tensor._unsafe_get_target();
    return now->unsafe_storage().unsafeGetStorageImpl() == memory && memory->data() == data &&
           now->storage_offset() == offset && now->numel() == numel && now->dtype() == dtype &&
           !now->key_set().has_any(kDeferred) &&
           (strides == 0 ? now->is_contiguous() : now->is_non_overlapping_and_dense() && strides_of(*now) == strides);
}

void Plan::check(const std::vector<TensorReference>& references, const char* list) {
    for (size_t i = 0; i < references.size(); ++i) {
        const TensorReference& reference = references[i];
        TORCH_CHECK(reference.is_alive(), kPlan, ": ", list, "[", i,
                    "] no longer exists; call update() with the tensors that took its place");
        TORCH_CHECK(reference.is_unmoved(), kPlan, ": ", list, "[", i,
                    "] moved to other memory or changed its size, strides or dtype; call update() with the tensors "
                    "as they are now");
    }
}

void Plan::bump_versions(const std::vector<TensorReference>& references) {
    // Apart from the looks, which would wait for each of these. The counter lives as long as the object's memory.
    for (const TensorReference& reference : references) reference.tensor._unsafe_get_target()->bump_version();
}

void Plan::locate(bool writes_tensors, bool writes_sources) const {
    check(tensors_, "tensors");
    check(sources_, "sources");
    check_not_followed("tensors", tensors_, writes_tensors);
    check_not_followed("sources", sources_, writes_sources);
    if (!writes_sources || !layout_.read.overlap()) return;
    const auto [first, second] = *layout_.read.overlap();
    TORCH_CHECK_VALUE(false, kPlan, ": sources ", first, " and ", second, " overlap, and would be zeroed twice");
}

void Plan::check(bool writes_tensors, bool writes_sources) const {
    locate(writes_tensors, writes_sources);
    if (writes_tensors) bump_versions(tensors_);
    if (writes_sources) bump_versions(sources_);
}

void Plan::check_not_followed(const char* list, const std::vector<TensorReference>& references, bool is_written) {
    const bool is_recorded = is_written && at::GradMode::is_enabled();
    if (!is_recorded && !is_forward_mode()) return;
    for (size_t i = 0; i < references.size(); ++i) {
        TORCH_CHECK_NOT_IMPLEMENTED(!is_followed(*references[i].tensor._unsafe_get_target(), is_recorded), kPlan,
                                    ": has no derivative, and ", list, "[", i,
                                    is_written ? "], which it writes, is followed by autograd; call it under "
                                                 "torch.no_grad() or give it tensor.detach()"
                                               : "] has a tangent; give it the primal");
    }
}

void Plan::check_not_inference(const char* list, const std::vector<TensorReference>& references) {
    for (size_t i = 0; i < references.size(); ++i) {
        TORCH_CHECK(!references[i].tensor._unsafe_get_target()->is_inference(), kPlan, ": expected ", list, "[", i,
                    "] made outside of inference mode, got an inference tensor; clone() it, or write it in that mode");
    }
}

void Plan::check_write(bool writes_sources, const Operands& operands) const {
    locate(true, writes_sources);
    operands.check_beside(layout_.written, layout_.read, writes_sources);
    if (layout_.has_inference && !c10::InferenceMode::is_enabled()) {
        check_not_inference("tensors", tensors_);
        if (writes_sources) check_not_inference("sources", sources_);
    }
}

void Plan::note_write(bool writes_sources) const {
    bump_versions(tensors_);
    if (writes_sources) bump_versions(sources_);
}

Plan::Tensors Plan::tensors(bool with_tensors, bool with_sources) const {
    Tensors alive;
    const auto add = [&](const std::vector<TensorReference>& references) {
        for (const TensorReference& reference : references) {
            const auto tensor = reference.tensor.lock();
            if (tensor.defined()) alive.emplace_back(tensor);
        }
    };
    if (with_tensors) add(tensors_);
    if (with_sources) add(sources_);
    return alive;
}

void Plan::update(const Tensors& tensors, const Tensors& sources) {
    TORCH_CHECK_VALUE(tensors.size() == tensors_.size() && sources.size() == sources_.size(), kPlan,
                      ": expected as many tensors as before, ", tensors_.size(), " and ", sources_.size(),
                      " sources, got ", tensors.size(), " and ", sources.size(), "; make a new plan");
    Layout layout = layout_of(tensors, sources);
    TORCH_CHECK_VALUE(tensors[0].device() == table_.device(), kPlan, ": expected tensors on ", table_.device(),
                      ", got ", tensors[0].device());
    std::vector<EntryUpdate> updates;
    for (size_t i = 0; i < layout.entries.size(); ++i) {
        const TableEntry &now = layout.entries[i], &before = layout_.entries[i];
        TORCH_CHECK_VALUE(now.numel == before.numel && now.source_dtype == before.source_dtype &&
                              now.destination_dtype == before.destination_dtype,
                          kPlan, ": expected tensors[", i, "] of ", before.numel,
                          " elements and the dtypes of before, got ", now.numel, " elements of ",
                          tensors[i].scalar_type(), "; make a new plan");
        if (now.destination == before.destination && now.source == before.source) continue;
        updates.push_back({now.source, now.destination, static_cast<int32_t>(i), now.mode, true});
    }
    auto* const table = static_cast<TableEntry*>(table_.mutable_data_ptr());
    const auto count = static_cast<int64_t>(updates.size());
    run_on(
        table_.device(), [&] { update_entries_cpu(table, updates.data(), count); },
        TE_GRAPH_LAUNCH(launch_update_entries(table, updates.data(), count, stream)));
    layout_ = std::move(layout);
    tensors_ = references_to(tensors);
    sources_ = references_to(sources);
}

}  // namespace te_graph::multi_tensor
