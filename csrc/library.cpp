// Everything that te_graph registers, on one page: the schemas of all ops and the extension module.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "collectives/bindings.h"
#include "common/cpu_only.h"
#include "common/math_bits.h"
#include "flat/bindings.h"
#include "fp8/bindings.h"
#include "graphs/bindings.h"
#include "multi_tensor/bindings.h"

// Mutated arguments are marked (a!); ops that mutate return (). What autograd tracks is not mutated
// (common/no_derivative.h).
TORCH_LIBRARY(te_graph, m) {
    const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
    using Kind = c10::AliasAnalysisKind;
    const auto def = [&](const char* text, Kind kind = Kind::FROM_SCHEMA) {
        m.def(torch::schema(text, kind), tags);
        const c10::FunctionSchema schema = torch::schema(text);
        const std::string name = toString(schema.operator_name());
#ifndef TE_GRAPH_CUDA
        m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CUDA, te_graph::cpu_only()));
#endif
        if (!schema.is_mutable()) return;
        for (const auto bit : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
            m.impl(name.c_str(), torch::dispatch(bit, te_graph::with_math_bits()));
        }
    };

    // Norms of lists: any shapes, fp32, fp64, fp16 and bf16 mixed. Results are fp32, fp64 if the list has fp64
    // tensors. p: 0 (number of elements that are not zero), positive or inf. partial: [72] int64
    // (csrc/multi_tensor/exact_sum.h), exact: those of several lists are added (p = inf: joined by max), on one device
    // or by all_reduce. Of an empty list: 0, on the CPU; shapes without data are in te_graph/multi_tensor/fake_ops.py.
    def("multi_tensor_norm(Tensor[] tensors, float p=2.0) -> Tensor");
    def("multi_tensor_norm_partial(Tensor[] tensors, float p=2.0) -> Tensor");
    def("multi_tensor_norm_finish(Tensor partial, float p=2.0, ScalarType dtype=float) -> Tensor");
    def("multi_tensor_norms(Tensor[] tensors, float p=2.0) -> Tensor");

    // In place. clip_norm_: norm and clip in one, returns the norm. total_norm, scale, found_inf, noop: [] or [1],
    // fp32 (total_norm and scale also fp64).
    def("multi_tensor_clip_(Tensor(a!)[] tensors, Tensor total_norm, float max_norm, *, float eps=1e-06, "
        "Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_clip_norm_(Tensor(a!)[] tensors, float max_norm, float p=2.0, *, Tensor(b!)? found_inf=None) -> "
        "Tensor");
    def("multi_tensor_scale_(Tensor(a!)[] tensors, Tensor scale, *, Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_scale_.Scalar(Tensor(a!)[] tensors, float scale, *, Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_zero_(Tensor(a!)[] tensors) -> ()");

    // Pairs of tensors. sum_squares: a partial of p = 2, added to.
    def("multi_tensor_copy_(Tensor(a!)[] destination, Tensor[] source, *, Tensor? scale=None, "
        "Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_accumulate_(Tensor(a!)[] destination, Tensor(b!)[] source, *, bool store=False, "
        "bool zero_source=False, Tensor? scale=None, Tensor(c!)? sum_squares=None, Tensor(d!)? found_inf=None, "
        "Tensor? noop=None) -> ()");

    // The same over a table in device memory, which may name other tensors at each replay.
    // table: [entries, 4] int64 (csrc/multi_tensor/table.h: TableEntry), chunks: [chunks, 2] int32 (Chunk), partial:
    // zeros before and after. The memory that the table's entries point to is read or written; it has no place in the
    // schema.
    def("multi_tensor_norm_table(Tensor table, Tensor chunks, Tensor(a!) partial, float p=2.0, "
        "ScalarType dtype=float) -> Tensor");
    def("multi_tensor_clip_table_(Tensor(a!) table, Tensor chunks, Tensor total_norm, float max_norm, *, "
        "float eps=1e-06, Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_scale_table_(Tensor(a!) table, Tensor chunks, Tensor scale, *, Tensor(b!)? found_inf=None) -> "
        "()");
    def("multi_tensor_zero_table_(Tensor(a!) table, Tensor chunks) -> ()");
    // store: None for each entry's own mode. Also the last node of a captured backward.
    def("multi_tensor_accumulate_table_(Tensor(a!) table, Tensor chunks, *, bool? store=None, bool zero_source=False, "
        "Tensor? scale=None, Tensor(b!)? sum_squares=None, Tensor(c!)? found_inf=None, Tensor? noop=None) -> ()");

    // Casts to FP8: x fp32, fp16 or bf16; scale, scale_inv, amax: [] or [1], fp32. amax is maxed into, scale_inv
    // written, counts ([3] int64: saturated, underflowed, not finite) added to. noop: [] or [1], int32, bool or fp32:
    // unless it is 0, nothing is touched. Results: cast, transposed cast, scale_inv, column sums.
    // out_t: [N, M], or [N, M rounded up to 16], whose rows then end in zeros.
    def("fp8_cast(Tensor x, Tensor scale, ScalarType dtype, *, Tensor(a!)? amax=None, Tensor(b!)? counts=None) -> "
        "(Tensor, Tensor)");
    def("fp8_cast_out(Tensor(a!) out, Tensor x, Tensor scale, *, Tensor(b!)? scale_inv=None, Tensor(c!)? amax=None, "
        "Tensor(d!)? counts=None, Tensor? noop=None) -> ()");
    def("fp8_cast_transpose(Tensor x, Tensor scale, ScalarType dtype, *, Tensor(a!)? amax=None, "
        "Tensor(b!)? counts=None) -> (Tensor, Tensor, Tensor)");
    def("fp8_cast_transpose_dbias(Tensor x, Tensor scale, ScalarType dtype, *, Tensor(a!)? amax=None, "
        "Tensor(b!)? counts=None) -> (Tensor, Tensor, Tensor, Tensor)");
    def("fp8_cast_transpose_out(Tensor(a!) out, Tensor(b!) out_t, Tensor x, Tensor scale, *, "
        "Tensor(c!)? scale_inv=None, Tensor(d!)? amax=None, Tensor(e!)? dbias=None, Tensor(f!)? counts=None, "
        "Tensor? noop=None) -> ()");
    // Casts of what an activation ("gelu", "gelu_tanh", "relu", "silu") makes of x [M, N], or, gated, of its first half,
    // times the second one [M, 2 N]; and of the gradient of x where that of the result is grad [M, N], with its column
    // sums. scale: None for current scaling. Rows of transposed copies end in zeros up to a multiple of 16; without one
    // that result is [0], as sums are that go into column_sums, of x's columns and dtype.
    def("fp8_activation_cast_transpose(Tensor x, str activation, ScalarType dtype, *, bool gated=False, "
        "Tensor? scale=None, Tensor(a!)? amax=None, bool with_transposed=True) -> (Tensor, Tensor, Tensor)");
    def("fp8_activation_backward_cast_transpose(Tensor grad, Tensor x, str activation, ScalarType dtype, *, "
        "bool gated=False, Tensor? scale=None, Tensor(a!)? amax=None, bool with_transposed=True, bool with_sums=True, "
        "Tensor(b!)? column_sums=None, bool accumulate_sums=False) -> (Tensor, Tensor, Tensor, Tensor)");
    // Casts of y = norm(s), s = x + residual [M, N], with s, or [0] without a residual, and the statistics of its rows,
    // mean, or [0] of RMS norm, and rstd [M]. weight, bias [N], of x's dtype or fp32; zero_centered: 1 + weight.
    def("fp8_layer_norm_cast_transpose(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, "
        "ScalarType dtype, *, bool rms_norm=False, bool zero_centered=False, Tensor? scale=None, "
        "Tensor(a!)? amax=None, bool with_transposed=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    // The gradient of s, of those of y and, or none, of s itself; with a dtype its casts, too. output_mask: the
    // gradients of weight and bias, the column sums of that of s.
    def("fp8_layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor sum, Tensor weight, Tensor? mean, Tensor rstd, "
        "*, bool zero_centered=False, ScalarType? dtype=None, Tensor? scale=None, Tensor(a!)? amax=None, "
        "bool with_transposed=True, bool[3] output_mask=[True, True, False], Tensor(b!)? grad_weight=None, "
        "bool accumulate_weight=False, Tensor(c!)? grad_bias=None, bool accumulate_bias=False, "
        "Tensor(d!)? column_sums=None, bool accumulate_sums=False) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    // And back: x FP8; dtype, out: fp32, fp16 or bf16; scale_inv: [] or [1], fp32.
    def("fp8_dequantize(Tensor x, Tensor scale_inv, ScalarType dtype) -> Tensor");
    def("fp8_dequantize_out(Tensor(a!) out, Tensor x, Tensor scale_inv) -> ()");

    // All weights of a model. scale, scale_inv, amax: [n] of any stride; counts: [n, 3]. out_t: n tensors or none.
    def("fp8_cast_weights_(Tensor(a!)[] out, Tensor(b!)[] out_t, Tensor[] weights, Tensor scale, Tensor(c!) scale_inv, "
        "Tensor(d!) amax, *, Tensor(e!)? counts=None, Tensor? noop=None) -> ()");
    // The same with vectors that have n elements together; without amax none is recorded.
    def("fp8_cast_weights_.List(Tensor(a!)[] out, Tensor(b!)[] out_t, Tensor[] weights, Tensor[] scale, "
        "Tensor(c!)[] scale_inv, Tensor(d!)[] amax) -> ()");
    // The same over a table in device memory. table: [n, 10] int64 (csrc/fp8/cast.h: Cast), tiles: [tiles, 2] int32
    // (Tile), state: [2] int32, zeros before and after; written: [...] each, all that the table says is written; kind:
    // as there.
    def("fp8_cast_weights_table_(Tensor table, Tensor tiles, Tensor(a!) state, Tensor(b!)[] written, *, "
        "int kind=0, Tensor? noop=None) -> ()");

    // Products of FP8 matrices: a [M, K] by b [N, K], both with rows of K contiguous; out: [M, N] fp32, fp16 or bf16.
    // a_scale_inv, b_scale_inv: [] or [1], fp32; bias: [N].
    def("fp8_gemm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, ScalarType dtype, *, Tensor? bias=None, "
        "bool fast_accum=False) -> Tensor");
    def("fp8_gemm_out(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, *, "
        "Tensor? bias=None, bool fast_accum=False, bool accumulate=False) -> ()");

    // The two directions of a linear layer. x: [..., I], grad: [..., O]: fp32, fp16 or bf16; weight: [O, I], weight_t:
    // [I, O], x_t: [I, tokens rounded up to 16]: FP8; scale: of the cast of x or grad, None for current scaling;
    // grad_dtype: of the cast of grad; x_dtype, weight_dtype: of the gradients. Results: y, x_t ([0] unless asked for),
    // x_scale_inv; gradients of x, weight, bias, as far as output_mask asks.
    // grad_weight: [O, I], or [I, O] with inputs_first (the weight is [I, O], and the operands of that product change
    // places); grad_bias: [O]. Given, they take the gradient, overwritten or, with accumulate_*, added to as by add_,
    // and it is no result.
    def("fp8_linear_forward(Tensor x, Tensor weight, Tensor weight_scale_inv, Tensor? bias, Tensor? scale, "
        "Tensor(a!)? amax, ScalarType dtype, bool with_transposed) -> (Tensor, Tensor, Tensor)");
    def("fp8_linear_backward(Tensor grad, Tensor? weight_t, Tensor? weight_scale_inv, Tensor? x_t, "
        "Tensor? x_scale_inv, Tensor? scale, Tensor(a!)? amax, ScalarType grad_dtype, ScalarType x_dtype, "
        "ScalarType weight_dtype, bool[3] output_mask, *, Tensor(b!)? grad_weight=None, bool accumulate_weight=False, "
        "Tensor(c!)? grad_bias=None, bool accumulate_bias=False, bool inputs_first=False) -> "
        "(Tensor, Tensor, Tensor)");

    // Gradients of queries [A, B, G * n, D], keys and values [A, B, G, D], of any strides, group by group side by side:
    // [A, B, G * (n + 2) * D].
    def("concat_qkv(Tensor query, Tensor key, Tensor value) -> Tensor");

    // Scales. amax_history: [H, n]; scale, scale_inv: [n]; non_weight_mask: [n] bool, or [0] where nothing is a weight.
    def("amax_and_scale_update_inplace(Tensor(a!) amax_history, Tensor(b!) scale, Tensor(c!) scale_inv, "
        "Tensor non_weight_mask, Tensor update_weight_scale_inv, float fp8_max, float margin=0.0, "
        "str amax_compute_algo=\"max\", *, bool skip_nonfinite=False) -> ()");
    def("amax_and_scale_update_inplace.Scalar(Tensor(a!) amax_history, Tensor(b!) scale, Tensor(c!) scale_inv, "
        "Tensor non_weight_mask, bool update_weight_scale_inv, float fp8_max, float margin=0.0, "
        "str amax_compute_algo=\"max\", *, bool skip_nonfinite=False) -> ()");
    // x, amax: [...], amax fp32. Results: amax and scale, [1] fp32 both; a scale for each element of amax, [...] fp32.
    def("fp8_current_scale(Tensor x, ScalarType dtype, *, float eps=0.0, bool power_of_2=False) -> (Tensor, Tensor)");
    def("fp8_scale(Tensor amax, ScalarType dtype, *, float margin=0.0, float eps=0.0, bool power_of_2=False) -> "
        "Tensor");

    // The state of a step: [16] int32 (csrc/graphs/step_state.h).
    def("step_state_set_(Tensor(a!) state, bool is_first_microbatch, bool update_weight_scale_inv) -> ()");
    def("step_state_advance_(Tensor(a!) state) -> ()");

    // Collectives of a te_graph.PeerGroup, by its name. x: any shape; fp32, fp16 or bf16 where there are sums,
    // reduction "sum", or "max" for fp32. Along `dim` reduce_scatter divides, all_gather multiplies the size by
    // world_size. What is no function of its arguments alone is not left out where its result is not used: CONSERVATIVE
    // says so to TorchScript, te_graph/collectives/effects.py to torch.compile.
    def("all_reduce(Tensor x, str group, str reduction=\"sum\") -> Tensor", Kind::CONSERVATIVE);
    def("all_reduce_(Tensor(a!) x, str group, str reduction=\"sum\") -> ()");
    // Sums times scale and scale_tensor, [] or [1] fp32; wire_dtype bf16: of fp32 that is sent as bf16.
    def("all_reduce_out(Tensor(a!) out, Tensor x, str group, str reduction=\"sum\", *, float scale=1.0, "
        "Tensor? scale_tensor=None, ScalarType? wire_dtype=None) -> ()");
    def("reduce_scatter(Tensor x, int dim, int world_size, str group, str reduction=\"sum\") -> Tensor",
        Kind::CONSERVATIVE);
    def("reduce_scatter_out(Tensor(a!) out, Tensor x, int dim, int world_size, str group, str reduction=\"sum\", *, "
        "float scale=1.0, Tensor? scale_tensor=None, ScalarType? wire_dtype=None) -> ()");
    def("all_gather(Tensor x, int dim, int world_size, str group) -> Tensor", Kind::CONSERVATIVE);
    def("all_gather_out(Tensor(a!) out, Tensor x, int dim, int world_size, str group) -> ()");
}

PYBIND11_MODULE(_C, m) {
    te_graph::graphs::bind(m);
    te_graph::multi_tensor::bind(m);
    te_graph::fp8::bind(m);
    te_graph::collectives::bind(m);
    te_graph::flat::bind(m);
}
