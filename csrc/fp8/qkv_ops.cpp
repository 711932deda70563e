// Registration of what puts gradients of queries, keys and values side by side.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "common/no_derivative.h"
#include "common/run_on.h"
#include "fp8/arguments.h"
#include "fp8/qkv.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kConcatQkv = "concat_qkv";

// query: [A, B, G * n, D] -> n.
c10::SymInt heads_per_group(const at::Tensor& query, const at::Tensor& key) {  // key: [A, B, G, D]
    TORCH_CHECK_VALUE(query.dim() == 4, kConcatQkv, ": expected query of four dimensions, got shape ",
                      query.sym_sizes());
    TORCH_CHECK_VALUE(key.dim() == 4, kConcatQkv, ": expected key of four dimensions, got shape ", key.sym_sizes());
    const c10::SymInt groups = key.sym_size(2);
    const bool divides = groups > 0 && query.sym_size(2) % groups == 0;
    TORCH_CHECK_VALUE(divides, kConcatQkv, ": expected heads of query that those of key divide, got shapes ",
                      query.sym_sizes(), " and ", key.sym_sizes());
    return query.sym_size(2) / groups;
}

void check_qkv(const at::Tensor& query,    // [A, B, G * n, D]
               const at::Tensor& key,      // [A, B, G, D]
               const at::Tensor& value) {  // [A, B, G, D]
    auto expected = key.sym_sizes().vec();
    TORCH_CHECK_VALUE(value.sym_sizes() == c10::SymIntArrayRef(expected), kConcatQkv, ": expected value of shape ",
                      key.sym_sizes(), ", as key, got ", value.sym_sizes());
    expected[2] = query.sym_size(2);
    TORCH_CHECK_VALUE(query.sym_sizes() == c10::SymIntArrayRef(expected), kConcatQkv, ": expected query of shape ",
                      c10::SymIntArrayRef(expected), ", as key has it, got ", query.sym_sizes());
    for (const auto& [name, part] : {std::pair("key", &key), std::pair("value", &value)}) {
        check_dtype(kConcatQkv, name, *part, query.scalar_type());
        check_device(kConcatQkv, name, *part, query.device());
    }
}

#ifdef TE_GRAPH_CUDA
// part: [A, B, heads, D]; nothing: a kernel cannot move it in pieces.
std::optional<QkvPart> part_of(const at::Tensor& part) {
    const int64_t size = part.element_size();
    if (part.layout() != at::kStrided || part.is_conj() || part.is_neg() || part.stride(3) != 1) return std::nullopt;
    const auto fits = [&](int64_t elements) { return elements * size % kPiece == 0; };
    const auto strides = part.strides().slice(0, 3);
    if (!fits(part.size(3)) || !std::all_of(strides.begin(), strides.end(), fits)) return std::nullopt;
    if (reinterpret_cast<uintptr_t>(part.const_data_ptr()) % kPiece != 0) return std::nullopt;
    const auto pieces = [&](int dim) { return part.stride(dim) * size / kPiece; };
    return QkvPart{part.const_data_ptr(), pieces(0), pieces(1), pieces(2)};
}
#endif

// Whether a kernel has put them side by side in out.
bool launch(const at::Tensor& query,  // [A, B, G * n, D]
            const at::Tensor& key,    // [A, B, G, D]
            const at::Tensor& value,  // [A, B, G, D]
            const at::Tensor& out) {  // [A, B, G * (n + 2) * D]
#ifdef TE_GRAPH_CUDA
    constexpr int64_t kMost = INT32_MAX;
    if (!out.is_cuda() || out.size(2) > kMost || out.size(0) * out.size(1) > kMost) return false;
    const auto of_query = part_of(query), of_key = part_of(key), of_value = part_of(value);
    if (!of_query || !of_key || !of_value) return false;
    const auto groups = static_cast<int>(key.size(2));
    const Qkv work{.query = *of_query,
                   .key = *of_key,
                   .value = *of_value,
                   .out = out.mutable_data_ptr(),
                   .outer = out.size(0),
                   .inner = out.size(1),
                   .groups = groups,
                   .heads_per_group = static_cast<int>(query.size(2)) / groups,
                   .pieces = static_cast<int>(query.size(3) * query.element_size() / kPiece)};
    const c10::cuda::CUDAGuard guard(out.device());
    C10_CUDA_CHECK(launch_concat_qkv(work, c10::cuda::getCurrentCUDAStream()));
    return true;
#else
    return false;
#endif
}

at::Tensor concat_qkv_meta(const at::Tensor& query,    // [A, B, G * n, D]
                           const at::Tensor& key,      // [A, B, G, D]
                           const at::Tensor& value) {  // [A, B, G, D]
    const c10::SymInt per_group = heads_per_group(query, key);
    check_qkv(query, key, value);
    const c10::SymInt columns = key.sym_size(2) * (per_group + 2) * key.sym_size(3);
    return at::empty_symint({query.sym_size(0), query.sym_size(1), columns}, query.options());
}

at::Tensor concat_qkv(const at::Tensor& query,    // [A, B, G * n, D]
                      const at::Tensor& key,      // [A, B, G, D]
                      const at::Tensor& value) {  // [A, B, G, D]
    at::Tensor out = concat_qkv_meta(query, key, value);
    if (launch(query, key, value, out)) return out;
    const int64_t groups = key.size(2);
    const auto grouped = [&](const at::Tensor& part) { return part.unflatten(2, {groups, part.size(2) / groups}); };
    return at::cat({grouped(query), grouped(key), grouped(value)}, 3).flatten(2);
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) { m.impl(kConcatQkv, concat_qkv); }
TORCH_LIBRARY_IMPL(te_graph, Meta, m) { m.impl(kConcatQkv, concat_qkv_meta); }
TORCH_LIBRARY_IMPL(te_graph, Autograd, m) { m.impl(kConcatQkv, no_derivative()); }

}  // namespace te_graph::fp8
