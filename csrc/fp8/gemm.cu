// Products of FP8 matrices by cuBLASLt, and the plans for them.
//
// cuBLASLt's matrices are column-major: what it calls D is out transposed, [columns, rows]; A is b, and B is a.
// Bytes: each operand once, out once, or twice where it is added to; more where L2 does not hold a panel.
// Determinism: one kernel for a shape on a kind of GPU, whatever the addresses; partial sums of a split inner dimension
// are added in a fixed order.
#include <cublasLt.h>

#include <array>
#include <list>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "fp8/gemm.h"

namespace te_graph::fp8 {

class GemmPlan {
public:
    cublasLtHandle_t handle;
    cublasLtMatmulDescOpaque_t operation;  // without addresses
    cublasLtMatrixLayoutOpaque_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
    GemmPlanInfo info;
};

namespace {

constexpr size_t kMostWorkspace = size_t{32} << 20;  // what cuBLAS recommends for Hopper
constexpr size_t kMostPlans = 4096;
constexpr int kCandidates = 32;

void check(cublasStatus_t status, const char* call) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw std::runtime_error(std::string("FP8 products: ") + call + ": " + cublasLtGetStatusString(status));
}

cudaDataType_t type_of(Format format) { return format == Format::kE4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }
cudaDataType_t type_of(DType dtype) {
    switch (dtype) {
        case DType::kFloat16:
            return CUDA_R_16F;
        case DType::kBFloat16:
            return CUDA_R_16BF;
        default:
            return CUDA_R_32F;
    }
}

[[noreturn]] void no_kernel_for(const GemmShape& shape) {
    std::ostringstream message;
    message << "FP8 products: cuBLASLt " << cublasLtGetVersion() << " has no kernel for [" << shape.rows << ", "
            << shape.inner << "] " << name_of(shape.a_format) << " by [" << shape.columns << ", " << shape.inner << "] "
            << name_of(shape.b_format);
    throw std::runtime_error(message.str());
}

template <typename T>
void set(cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
}

template <typename T>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
}

int attribute_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
    int32_t value = 0;
    size_t written = 0;
    check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written),
          "cublasLtMatmulAlgoConfigGetAttribute");
    return value;
}

// All but addresses.
void describe(GemmPlan& plan, const GemmShape& shape) {
    check(cublasLtMatmulDescInit(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
    set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(shape.fast_accum));
    if (shape.has_bias) {
        set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(shape.dtype));
    }
    const auto init = [](cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, int64_t rows, int64_t columns,
                         int64_t stride) {
        check(cublasLtMatrixLayoutInit(&layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                       stride),
              "cublasLtMatrixLayoutInit");
    };
    init(plan.a, type_of(shape.b_format), shape.inner, shape.columns, shape.b_stride);
    init(plan.b, type_of(shape.a_format), shape.inner, shape.rows, shape.a_stride);
    init(plan.out, type_of(shape.dtype), shape.columns, shape.rows, shape.columns);
}

// Up to cuBLAS 13.4, kernels of this family give wrong results where the inner dimension is split into parts of unequal
// size, and the smaller ones end where a stage of the pipeline does; stages are multiples of 8.
bool is_wrong(const cublasLtMatmulAlgo_t& algorithm, const GemmShape& shape) {
    constexpr int kFamily = 66, kLeastStage = 8;
    const int split = attribute_of(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
    return attribute_of(algorithm, CUBLASLT_ALGO_CONFIG_ID) == kFamily && split > 1 && shape.inner % split != 0 &&
           shape.inner / split % kLeastStage == 0;
}

// The first candidate that is right.
void choose(GemmPlan& plan, const GemmShape& shape) {
    cublasLtMatmulPreferenceOpaque_t preference;
    check(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMostWorkspace);
    // The same for all addresses that are accepted, or bits would depend on them.
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        set(preference, attribute, static_cast<uint32_t>(kGemmAlignment));
    }
    cublasLtMatmulDescOpaque_t operation = plan.operation;
    // The heuristics look at the alignment of what these point to, not at what is there.
    const auto* const anywhere = reinterpret_cast<const void*>(kGemmAlignment);
    set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, anywhere);
    set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, anywhere);
    if (shape.has_bias) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, anywhere);
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> candidates;
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(plan.handle, &operation, &plan.a, &plan.b, &plan.out, &plan.out, &preference,
                                       kCandidates, candidates.data(), &count);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < count; ++i) {
        const auto& [algorithm, workspace, state, waves, reserved] = candidates[static_cast<size_t>(i)];
        if (state != CUBLAS_STATUS_SUCCESS || is_wrong(algorithm, shape)) continue;
        plan.algorithm = algorithm;
        plan.info = {.shape = shape,
                     .device = plan.info.device,
                     .algorithm = attribute_of(algorithm, CUBLASLT_ALGO_CONFIG_ID),
                     .tile = attribute_of(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
                     .stages = attribute_of(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                     .split_k = attribute_of(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                     .workspace = workspace};
        return;
    }
    no_kernel_for(shape);
}

// A handle allocates and heuristics may load kernels, which no capture would record, and some refuse.
class RelaxedCapture {
public:
    RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The plans of this process, those used last first; the ones used longest ago are dropped.
class Plans {
public:
    std::shared_ptr<const GemmPlan> find(int device, const GemmShape& shape) {
        const std::lock_guard lock(mutex_);
        const Key key{device, shape};
        if (const auto found = places_.find(key); found != places_.end()) {
            plans_.splice(plans_.begin(), plans_, found->second);
            return plans_.front();
        }
        const RelaxedCapture relaxed;
        auto plan = std::make_shared<GemmPlan>();
        plan->handle = handle_of(device);
        plan->info.device = device;
        describe(*plan, shape);
        choose(*plan, shape);
        plans_.push_front(std::move(plan));
        places_.emplace(key, plans_.begin());
        if (plans_.size() > kMostPlans) {
            places_.erase({plans_.back()->info.device, plans_.back()->info.shape});
            plans_.pop_back();
        }
        return plans_.front();
    }

    std::vector<GemmPlanInfo> list() {
        const std::lock_guard lock(mutex_);
        std::vector<GemmPlanInfo> infos;
        for (const auto& plan : plans_) infos.push_back(plan->info);
        return infos;
    }

private:
    struct Key {
        int device;
        GemmShape shape;
        bool operator==(const Key&) const = default;
    };
    struct Hash {
        size_t operator()(const Key& key) const {
            const GemmShape& shape = key.shape;
            size_t hash = 0;
            const auto add = [&](int64_t value) {
                hash ^= std::hash<int64_t>()(value) + 0x9E3779B97F4A7C15u + (hash << 6) + (hash >> 2);
            };
            for (const int64_t size : {shape.rows, shape.columns, shape.inner, shape.a_stride, shape.b_stride})
                add(size);
            add(key.device * 4 + static_cast<int>(shape.dtype));
            add(static_cast<int>(shape.a_format) * 2 + static_cast<int>(shape.b_format));
            add(shape.has_bias * 4 + shape.fast_accum * 2 + shape.accumulate);
            return hash;
        }
    };

    // Of the current device, which is `device`.
    cublasLtHandle_t handle_of(int device) {
        auto& handle = handles_[device];
        if (handle == nullptr) check(cublasLtCreate(&handle), "cublasLtCreate");
        return handle;
    }

    std::mutex mutex_;
    std::list<std::shared_ptr<const GemmPlan>> plans_;
    std::unordered_map<Key, decltype(plans_)::iterator, Hash> places_;
    std::unordered_map<int, cublasLtHandle_t> handles_;  // never destroyed: at exit the driver may be gone
};

// Never destroyed either.
Plans& plans() {
    static auto* const instance = new Plans;
    return *instance;
}

// cuBLASLt takes layouts that it does not change by pointers to what may be changed.
cublasLtMatrixLayout_t unchanged(const cublasLtMatrixLayoutOpaque_t& layout) {
    return const_cast<cublasLtMatrixLayout_t>(&layout);
}

int current_device() {
    int device = 0;
    cudaGetDevice(&device);
    return device;
}

}  // namespace

bool has_fp8_gemm(int device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return major * 10 + minor >= 89;
}

std::shared_ptr<const GemmPlan> gemm_plan(const GemmShape& shape) { return plans().find(current_device(), shape); }

size_t workspace_of(const GemmPlan& plan) { return plan.info.workspace; }

void launch_gemm(const Gemm& work, const GemmPlan& plan, void* workspace, cudaStream_t stream) {
    // A copy: other threads and streams use the plan at the same time.
    cublasLtMatmulDescOpaque_t operation = plan.operation;
    set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, work.b_scale_inv);
    set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, work.a_scale_inv);
    if (work.bias != nullptr) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, work.bias);
    const float one = 1, added = work.shape.accumulate ? 1 : 0;
    const auto a = unchanged(plan.a), b = unchanged(plan.b), out = unchanged(plan.out);
    check(cublasLtMatmul(plan.handle, &operation, &one, work.b, a, work.a, b, &added, work.out, out, work.out, out,
                         &plan.algorithm, workspace, plan.info.workspace, stream),
          "cublasLtMatmul");
}

std::vector<GemmPlanInfo> gemm_plans() { return plans().list(); }

}  // namespace te_graph::fp8
