// Registration of the multi-tensor ops over lists of tensors.
#include "multi_tensor/ops.h"

#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "multi_tensor/arguments.h"
#include "multi_tensor/operands.h"
#include "multi_tensor/tensor_entries.h"

namespace te_graph::multi_tensor {
namespace {

constexpr const char* kNorm = "multi_tensor_norm";
constexpr const char* kNormPartial = "multi_tensor_norm_partial";
constexpr const char* kFinish = "multi_tensor_norm_finish";
constexpr const char* kNorms = "multi_tensor_norms";
constexpr const char* kClip = "multi_tensor_clip_";
constexpr const char* kClipNorm = "multi_tensor_clip_norm_";
constexpr const char* kScale = "multi_tensor_scale_";
constexpr const char* kScaleByNumber = "multi_tensor_scale_.Scalar";
constexpr const char* kZero = "multi_tensor_zero_";
constexpr const char* kCopy = "multi_tensor_copy_";
constexpr const char* kAccumulate = "multi_tensor_accumulate_";

at::TensorOptions partial_options(at::Device device) { return at::TensorOptions().dtype(at::kLong).device(device); }

// A sum of nothing: [kPartialWords] int64.
at::Tensor new_partial(at::Device device) {
    const at::Tensor partial = at::empty({kPartialWords}, partial_options(device));
    auto* const words = static_cast<uint64_t*>(partial.mutable_data_ptr());
    run_on(
        device, [&] { std::fill_n(words, kPartialWords, 0); }, TE_GRAPH_LAUNCH(launch_clear(words, stream)));
    return partial;
}

at::Tensor norm(at::TensorList tensors,  // [...] each
                double p) {
    check_p(kNorm, p);
    const TensorEntries entries(kNorm, tensors, false);
    const at::Tensor partial = new_partial(entries.device());
    const at::Tensor out = at::empty({}, partial.options().dtype(norm_dtype(entries.has_double())));
    TE_GRAPH_RUN(entries.device(), norm, entries.table(), p, static_cast<uint64_t*>(partial.mutable_data_ptr()),
                 result_in(out));
    return out;
}

at::Tensor norm_partial(at::TensorList tensors,  // [...] each
                        double p) {
    check_p(kNormPartial, p);
    const TensorEntries entries(kNormPartial, tensors, false);
    const at::Tensor partial = new_partial(entries.device());
    TE_GRAPH_RUN(entries.device(), norm, entries.table(), p, static_cast<uint64_t*>(partial.mutable_data_ptr()), {});
    return partial;
}

at::Tensor norm_finish(const at::Tensor& partial,  // [kPartialWords] int64
                       double p, at::ScalarType dtype) {
    check_p(kFinish, p);
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, kFinish, ": expected dtype float32 or float64, got ",
                     dtype);
    check_strided(kFinish, "partial", partial);
    const uint64_t* const words = partial_of(kFinish, "partial", partial, partial.device());
    const at::Tensor out = at::empty({}, partial.options().dtype(dtype));
    const NormResult result = result_in(out);
    TE_GRAPH_RUN(partial.device(), finish_norm, words, p, result);
    return out;
}

at::Tensor norms(at::TensorList tensors,  // [...] each
                 double p) {
    check_p(kNorms, p);
    const TensorEntries entries(kNorms, tensors, false);
    const TensorTable table = entries.table();
    const at::Tensor out =
        at::empty({table.count}, at::TensorOptions().device(entries.device()).dtype(norm_dtype(entries.has_double())));
    const int64_t partials = entries.device().is_cpu() ? 0 : table.count;
    const at::Tensor scratch = at::empty({partials, kPartialWords}, partial_options(entries.device()));
    const NormResult result = result_in(out);
    [[maybe_unused]] auto* const words = static_cast<uint64_t*>(scratch.mutable_data_ptr());
    run_on(
        entries.device(), [&] { norms_cpu(table, p, result); },
        TE_GRAPH_LAUNCH(launch_norms(table, p, words, result, stream)));
    return out;
}

// Everything is checked and nothing written.
struct PreparedScaling {
    TensorEntries entries;
    Scaling scaling;

    void run() {
        TE_GRAPH_RUN(entries.device(), scale, entries.table(), scaling);
        entries.finish();
    }
};
struct PreparedAccumulation {
    TensorEntries entries;
    Accumulation accumulation;

    void run() {
        TE_GRAPH_RUN(entries.device(), accumulate, entries.table(), accumulation);
        entries.finish();
    }
};

PreparedScaling prepare_clip(at::TensorList tensors,        // [...] each
                             const at::Tensor& total_norm,  // [] or [1]
                             double max_norm, double eps,
                             const std::optional<at::Tensor>& found_inf)  // [] or [1]
{
    TensorEntries entries(kClip, tensors, true);
    const Scaling clip = clip_of(kClip, total_norm, max_norm, eps, found_inf, entries.device());
    Operands(kClip, {{"total_norm", total_norm, false}, {"found_inf", found_inf, true}}).check_beside(entries, false);
    return {std::move(entries), clip};
}

void clip(at::TensorList tensors,        // [...] each
          const at::Tensor& total_norm,  // [] or [1]
          double max_norm, double eps,
          const std::optional<at::Tensor>& found_inf)  // [] or [1]
{
    if (tensors.empty()) {
        // A rank without gradients also reports the norm over all ranks in found_inf.
        const Operands operands(kClip, {{"total_norm", total_norm, false}, {"found_inf", found_inf, true}});
        const Scaling clip = clip_of(kClip, total_norm, max_norm, eps, found_inf, total_norm.device());
        if (found_inf) TE_GRAPH_RUN(total_norm.device(), scale, {}, clip);
    } else {
        prepare_clip(tensors, total_norm, max_norm, eps, found_inf).run();
    }
    note_writes({found_inf});
}

at::Tensor clip_norm(at::TensorList tensors,  // [...] each
                     double max_norm, double p,
                     const std::optional<at::Tensor>& found_inf)  // [] or [1]
{
    check_p(kClipNorm, p);
    TensorEntries entries(kClipNorm, tensors, true);
    const at::Tensor out =
        at::empty({}, at::TensorOptions().device(entries.device()).dtype(norm_dtype(entries.has_double())));
    const Scaling clip = clip_of(kClipNorm, out, max_norm, kClipEps, found_inf, entries.device());
    Operands(kClipNorm, {{"found_inf", found_inf, true}}).check_beside(entries, false);
    const at::Tensor partial = new_partial(entries.device());
    TE_GRAPH_RUN(entries.device(), norm, entries.table(), p, static_cast<uint64_t*>(partial.mutable_data_ptr()),
                 result_in(out));
    TE_GRAPH_RUN(entries.device(), scale, entries.table(), clip);
    entries.finish();
    note_writes({found_inf});
    return out;
}

void scale_by(at::TensorList tensors,                      // [...] each
              const at::Tensor& scale,                     // [] or [1]
              const std::optional<at::Tensor>& found_inf)  // [] or [1]
{
    if (tensors.empty()) return;
    TensorEntries entries(kScale, tensors, true);
    const Scaling scaling{.scale = scalar_of(kScale, "scale", scale, entries.device()),
                          .found_inf = flag_of(kScale, "found_inf", found_inf, entries.device())};
    Operands(kScale, {{"scale", scale, false}, {"found_inf", found_inf, true}}).check_beside(entries, false);
    PreparedScaling{std::move(entries), scaling}.run();
    note_writes({found_inf});
}

void scale_by_number(at::TensorList tensors,  // [...] each
                     double scale,
                     const std::optional<at::Tensor>& found_inf)  // [] or [1]
{
    if (tensors.empty()) return;
    TensorEntries entries(kScale, tensors, true);
    const Scaling scaling{.scale = {.value = scale},
                          .found_inf = flag_of(kScale, "found_inf", found_inf, entries.device())};
    Operands(kScale, {{"found_inf", found_inf, true}}).check_beside(entries, false);
    PreparedScaling{std::move(entries), scaling}.run();
    note_writes({found_inf});
}

void zero(at::TensorList tensors)  // [...] each
{
    TensorEntries entries(kZero, tensors, true);
    TE_GRAPH_RUN(entries.device(), zero, entries.table());
    entries.finish();
}

void copy(at::TensorList destination,                  // [...] each
          at::TensorList source,                       // [...] each
          const std::optional<at::Tensor>& scale,      // [] or [1]
          const std::optional<at::Tensor>& found_inf)  // [] or [1]
{
    TORCH_CHECK_VALUE(!destination.empty() || source.empty(), kCopy, ": expected no sources, got ", source.size());
    if (destination.empty()) return;
    TensorEntries entries(kCopy, destination, source, false);
    Accumulation accumulation =
        accumulation_of(kCopy, scale, false, std::nullopt, found_inf, std::nullopt, entries.device());
    accumulation.has_mode = true;
    accumulation.mode = Mode::kStore;
    Operands(kCopy, {{"scale", scale, false}, {"found_inf", found_inf, true}}).check_beside(entries, false);
    PreparedAccumulation{std::move(entries), accumulation}.run();
    note_writes({found_inf});
}

PreparedAccumulation prepare_accumulate(at::TensorList destination,  // [...] each
                                        at::TensorList source,       // [...] each
                                        bool store, bool zero_source,
                                        const std::optional<at::Tensor>& scale,        // [] or [1]
                                        const std::optional<at::Tensor>& sum_squares,  // [kPartialWords]
                                        const std::optional<at::Tensor>& found_inf,    // [] or [1]
                                        const std::optional<at::Tensor>& noop)         // [] or [1]
{
    TensorEntries entries(kAccumulate, destination, source, zero_source);
    for (size_t i = 0; i < entries.entries().size(); ++i) {
        TORCH_CHECK_TYPE(is_supported(entries.entries()[i].source_dtype, entries.entries()[i].destination_dtype),
                         kAccumulate, ": expected source[", i, "] of the destination's dtype, or torch.float16 or ",
                         "torch.bfloat16 for torch.float32, got ", dtype_name(source[i].scalar_type()), " for ",
                         dtype_name(destination[i].scalar_type()));
    }
    Accumulation accumulation =
        accumulation_of(kAccumulate, scale, zero_source, sum_squares, found_inf, noop, entries.device());
    accumulation.has_mode = true;
    accumulation.mode = store ? Mode::kStore : Mode::kAdd;
    Operands(kAccumulate, {{"scale", scale, false},
                           {"sum_squares", sum_squares, true},
                           {"found_inf", found_inf, true},
                           {"noop", noop, false}})
        .check_beside(entries, zero_source);
    return {std::move(entries), accumulation};
}

void accumulate(at::TensorList destination,  // [...] each
                at::TensorList source,       // [...] each
                bool store, bool zero_source,
                const std::optional<at::Tensor>& scale,        // [] or [1]
                const std::optional<at::Tensor>& sum_squares,  // [kPartialWords]
                const std::optional<at::Tensor>& found_inf,    // [] or [1]
                const std::optional<at::Tensor>& noop)         // [] or [1]
{
    TORCH_CHECK_VALUE(!destination.empty() || source.empty(), kAccumulate, ": expected no sources, got ",
                      source.size());
    if (destination.empty()) return;
    prepare_accumulate(destination, source, store, zero_source, scale, sum_squares, found_inf, noop).run();
    note_writes({sum_squares, found_inf});
}

// Shapes and dtypes alone, for torch.compile and fake tensors.
// te_graph/multi_tensor/fake_ops.py has those whose result has no tensor to take its device from where the list is
// empty.

using Optional = const std::optional<at::Tensor>&;

// lists: [...] each; operands: [] or [1] each. One tensor on meta among others brings a call here, where nothing would
// be done to these.
void check_one_device(const char* op, std::initializer_list<std::pair<const char*, at::TensorList>> lists,
                      std::initializer_list<std::pair<const char*, std::optional<at::Tensor>>> operands) {
    std::optional<at::Device> device;
    const auto check = [&](const char* argument, const at::Tensor& tensor) {
        if (!device) device = tensor.device();
        check_device(op, argument, tensor, *device);
    };
    for (const auto& [name, list] : lists) {
        for (const at::Tensor& tensor : list) check(name, tensor);
    }
    for (const auto& [name, tensor] : operands) {
        if (tensor) check(name, *tensor);
    }
}

// partial [kPartialWords] -> [].
at::Tensor norm_finish_meta(const at::Tensor& partial, double, at::ScalarType dtype) {
    return at::empty({}, partial.options().dtype(dtype));
}

void implement(torch::Library& m) {
    m.impl(kNorm, norm);
    m.impl(kNormPartial, norm_partial);
    m.impl(kFinish, norm_finish);
    m.impl(kNorms, norms);
    m.impl(kClip, clip);
    m.impl(kClipNorm, clip_norm);
    m.impl(kScale, scale_by);
    m.impl(kScaleByNumber, scale_by_number);
    m.impl(kZero, zero);
    m.impl(kCopy, copy);
    m.impl(kAccumulate, accumulate);
}

}  // namespace

void check_clip(at::TensorList tensors, const at::Tensor& total_norm, double max_norm, double eps,
                const std::optional<at::Tensor>& found_inf) {
    prepare_clip(tensors, total_norm, max_norm, eps, found_inf);
}

void check_accumulate(at::TensorList destination, at::TensorList source, bool store, bool zero_source,
                      const std::optional<at::Tensor>& sum_squares, const std::optional<at::Tensor>& found_inf,
                      const std::optional<at::Tensor>& noop) {
    prepare_accumulate(destination, source, store, zero_source, std::nullopt, sum_squares, found_inf, noop);
}

void check_destinations(at::TensorList tensors, bool is_written, const std::optional<at::Tensor>& sum_squares,
                        const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& noop) {
    const TensorEntries entries(kAccumulate, tensors, is_written);
    accumulation_of(kAccumulate, std::nullopt, false, sum_squares, found_inf, noop, entries.device());
    Operands(kAccumulate, {{"sum_squares", sum_squares, true}, {"found_inf", found_inf, true}, {"noop", noop, false}})
        .check_beside(entries, false);
}

// One implementation for all devices, which is what empty lists, having none, and unfit tensors come to as well.
TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) { implement(m); }

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kFinish, norm_finish_meta);
    m.impl(kClip, [](at::TensorList tensors, const at::Tensor& total_norm, double, double, Optional found_inf) {
        check_one_device(kClip, {{"tensors", tensors}}, {{"total_norm", total_norm}, {"found_inf", found_inf}});
    });
    m.impl(kScale, [](at::TensorList tensors, const at::Tensor& scale, Optional found_inf) {
        check_one_device(kScale, {{"tensors", tensors}}, {{"scale", scale}, {"found_inf", found_inf}});
    });
    m.impl(kScaleByNumber, [](at::TensorList tensors, double, Optional found_inf) {
        check_one_device(kScale, {{"tensors", tensors}}, {{"found_inf", found_inf}});
    });
    m.impl(kZero, [](at::TensorList tensors) { check_one_device(kZero, {{"tensors", tensors}}, {}); });
    m.impl(kCopy, [](at::TensorList destination, at::TensorList source, Optional scale, Optional found_inf) {
        check_one_device(kCopy, {{"destination", destination}, {"source", source}},
                         {{"scale", scale}, {"found_inf", found_inf}});
    });
    m.impl(kAccumulate, [](at::TensorList destination, at::TensorList source, bool, bool, Optional scale,
                           Optional sum_squares, Optional found_inf, Optional noop) {
        check_one_device(kAccumulate, {{"destination", destination}, {"source", source}},
                         {{"scale", scale}, {"sum_squares", sum_squares}, {"found_inf", found_inf}, {"noop", noop}});
    });
}

TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name :
         {kNorm, kNormPartial, kFinish, kNorms, kClip, kClipNorm, kScale, kScaleByNumber, kZero, kCopy, kAccumulate}) {
        m.impl(name, no_derivative());
    }
}

}  // namespace te_graph::multi_tensor
