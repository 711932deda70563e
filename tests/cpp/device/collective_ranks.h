// A group of ranks on one device for the tests of collectives, and the memory of an operation on all of them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <stdexcept>
#include <vector>

#include "collectives/protocols.h"
#include "device_memory.h"

namespace te_graph::collectives {

using multi_tensor::Buffer;
using multi_tensor::check;

constexpr uint64_t kMillisecond = 1000000;
constexpr uint64_t kSequences = 1ull << kSequenceBits;

// Kernels that wait for each other need a hardware queue for each stream, and no code may be loaded while they wait.
// Both are read when the driver starts.
class DriverSettings : public testing::Environment {
public:
    void SetUp() override {
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
        setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    }
};

class Stream {
public:
    Stream() {
        cudaStream_t stream;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        stream_.reset(stream);
    }
    cudaStream_t get() const { return stream_.get(); }

private:
    struct Destroy {
        void operator()(cudaStream_t stream) const { EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess); }
    };
    std::unique_ptr<CUstream_st, Destroy> stream_;
};

// The memory of a rank, as on a GPU of its own.
class Rank {
public:
    Rank(int64_t half_bytes, uint64_t first_sequence)
        : half_bytes_(half_bytes), receive_buffer_(sizeof(SignalPad) + 6 * half_bytes), control_(sizeof(Control)) {
        receive_buffer_.fill(0);
        const std::vector<char> empty(2 * half_bytes, static_cast<char>(kSentinelByte));
        receive_buffer_.write(sizeof(SignalPad) + 2 * half_bytes, empty.data(), empty.size());
        void* memory = nullptr;
        check(cudaHostAlloc(&memory, sizeof(FailureRecord), cudaHostAllocMapped));
        record_.reset(new (memory) FailureRecord{});
        check(cudaHostGetDevicePointer(&memory, record_.get(), 0));
        Control control{};
        control.state = first_sequence << kSequenceShift;
        control.record = static_cast<FailureRecord*>(memory);
        control_.write(0, &control, sizeof(control));
    }

    char* receive_buffer() const { return receive_buffer_.at(0); }
    // Whether all data slots hold sentinels again.
    bool is_empty() const {
        std::vector<char> data(2 * half_bytes_);
        receive_buffer_.read(sizeof(SignalPad) + 2 * half_bytes_, data.data(), data.size());
        return std::all_of(data.begin(), data.end(),
                           [](char byte) { return byte == static_cast<char>(kSentinelByte); });
    }
    Control* control_on_device() const { return reinterpret_cast<Control*>(control_.at(0)); }
    cudaStream_t stream() const { return stream_.get(); }

    const FailureRecord& record() const { return *record_; }
    Control control() const {
        Control control;
        control_.read(0, &control, sizeof(control));
        return control;
    }
    SignalPad signal_pad() const {
        SignalPad signal_pad;
        receive_buffer_.read(0, &signal_pad, sizeof(signal_pad));
        return signal_pad;
    }
    uint64_t abort() const { return signal_pad().abort; }
    void set_timeout(uint64_t ns) const { control_.write(offsetof(Control, timeout_ns), &ns, sizeof(ns)); }

private:
    struct FreeHost {
        void operator()(FailureRecord* record) const { EXPECT_EQ(cudaFreeHost(record), cudaSuccess); }
    };
    int64_t half_bytes_;
    Buffer receive_buffer_, control_;
    std::unique_ptr<FailureRecord, FreeHost> record_;
    Stream stream_;
};

class Ranks {
public:
    // Of each protocol. Halves of up to seven slots are multiples of a line.
    static constexpr int64_t kHalfBytes = 420 * kLineBytes * 300;
    static int64_t slot_bytes(int world) { return kHalfBytes / (world - 1); }

    explicit Ranks(int world, uint64_t first_sequence = 1) : first_sequence_(first_sequence) {
        for (int rank = 0; rank < world; ++rank) {
            ranks_.push_back(std::make_unique<Rank>(kHalfBytes, first_sequence));
        }
        set_timeout(2000 * kMillisecond);
    }
    // Also after a test that has failed: nothing runs when memory is freed.
    ~Ranks() { EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess); }
    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;

    int world() const { return static_cast<int>(ranks_.size()); }
    const Rank& operator[](int rank) const { return *ranks_[rank]; }
    Peers peers(int rank) const {
        Peers peers{};
        for (int p = 0; p < world(); ++p) peers.receive_buffer[p] = ranks_[p]->receive_buffer();
        peers.control = ranks_[rank]->control_on_device();
        peers.ll128_slot_bytes = peers.data_slot_bytes = peers.flag_slot_bytes = slot_bytes(world());
        peers.rank = rank;
        peers.world = world();
        return peers;
    }
    void set_timeout(uint64_t ns) const {
        for (const auto& rank : ranks_) rank->set_timeout(ns);
    }

    // All ranks have finished this many operations, and none has aborted.
    void expect_finished(int operations) const {
        check(cudaDeviceSynchronize());
        for (int rank = 0; rank < world(); ++rank) {
            const Control control = ranks_[rank]->control();
            EXPECT_EQ(control.state, (first_sequence_ + operations) << kSequenceShift) << "rank " << rank;
            EXPECT_EQ(control.failed, 0.0f) << "rank " << rank;
            EXPECT_TRUE(ranks_[rank]->is_empty()) << "rank " << rank;
            EXPECT_EQ(ranks_[rank]->abort(), 0u) << "rank " << rank;
            EXPECT_EQ(ranks_[rank]->record().is_set, 0)
                << "rank " << rank << ": failure " << static_cast<int>(ranks_[rank]->record().failure) << " of peer "
                << ranks_[rank]->record().peer;
        }
    }

private:
    uint64_t first_sequence_;
    std::vector<std::unique_ptr<Rank>> ranks_;
};

constexpr Algorithm kAlgorithms[] = {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kReduceScatter,
                                     Algorithm::kAllGather};

struct Case {
    Algorithm algorithm;
    Element element = Element::kFloat32;
    Reduction reduction = Reduction::kSum;
    int64_t numel;             // all-reduce: of all, else of the piece of a rank
    int64_t input_offset = 0;  // in bytes, behind a boundary of 256 bytes
    int64_t out_offset = 0;
    bool is_in_place = false;
    float scale = 1;  // of sums
    Protocol protocol = Protocol::kLL128;
    int in_pool = 0;          // bit r: rank r's output lies where its peers can write it
    bool is_special = false;  // zeros, NaN, infinities and subnormals among the inputs
    // That ranks compare; what moves is the same.
    int64_t dim = 0, before = 1, behind = 1;

    int64_t element_bytes() const { return element == Element::kFloat32 ? 4 : element == Element::kBytes ? 1 : 2; }
};

inline std::ostream& operator<<(std::ostream& out, const Case& now) {
    constexpr const char* kAlgorithmNames[] = {"one-shot all-reduce", "two-shot all-reduce", "reduce-scatter",
                                               "all-gather"};
    constexpr const char* kElementNames[] = {"fp32", "fp16", "bf16", "bytes"};
    constexpr const char* kProtocolNames[] = {", LL128", ", Lamport", ", simple, in pools ", ", Lamport in bf16"};
    out << kAlgorithmNames[static_cast<int>(now.algorithm)]
        << (now.reduction == Reduction::kMax ? " (max) of " : " of ") << now.numel << ' '
        << kElementNames[static_cast<int>(now.element)] << ", input at " << now.input_offset << ", out at "
        << now.out_offset << (now.is_in_place ? ", in place" : "") << ", times " << now.scale
        << (now.is_special ? ", special values" : "");
    if (now.dim > 0) out << ", along dim " << now.dim << " behind " << now.before << ", before " << now.behind;
    out << kProtocolNames[static_cast<int>(now.protocol)];
    return now.protocol == Protocol::kSimple ? out << now.in_pool : out;
}

// Elements, reductions and protocols that an algorithm supports.
inline std::vector<Case> cases_of(Algorithm algorithm, int64_t numel) {
    std::vector<Case> cases;
    if (algorithm == Algorithm::kAllGather) {
        cases = {{.algorithm = algorithm, .element = Element::kBytes, .numel = numel}};
    } else {
        cases = {{.algorithm = algorithm, .numel = numel},
                 {.algorithm = algorithm, .reduction = Reduction::kMax, .numel = numel},
                 {.algorithm = algorithm, .element = Element::kFloat16, .numel = numel},
                 {.algorithm = algorithm, .element = Element::kBFloat16, .numel = numel}};
    }
    const size_t count = cases.size();
    if (algorithm == Algorithm::kTwoShot || algorithm == Algorithm::kReduceScatter) {
        cases.push_back({.algorithm = algorithm, .numel = numel, .protocol = Protocol::kLamportBf16});
    }
    for (size_t i = 0; i < count; ++i) {
        if (algorithm != Algorithm::kAllGather) {
            cases.push_back(cases[i]);
            cases.back().protocol = Protocol::kLamport;
            continue;
        }
        // The outputs of no, some and all ranks in pools.
        for (const int in_pool : {0, 0b01010101, 0xFF}) {
            cases.push_back(cases[i]);
            cases.back().protocol = Protocol::kSimple;
            cases.back().in_pool = in_pool;
        }
    }
    return cases;
}
// Of up to 2^largest elements.
inline Case random_case(int largest, std::mt19937_64& generator) {
    const auto numel = static_cast<int64_t>(1 + generator() % (1ull << generator() % (largest + 1)));
    const std::vector<Case> cases = cases_of(kAlgorithms[generator() % 4], numel);
    Case now = cases[generator() % cases.size()];
    now.input_offset = static_cast<int64_t>(generator() % 3) * now.element_bytes();
    now.out_offset = static_cast<int64_t>(generator() % 3) * now.element_bytes();
    now.is_in_place = generator() % 3 == 0;
    if (now.reduction == Reduction::kSum && generator() % 2 == 0) now.scale = 1.0f / 3;
    return now;
}

inline auto launcher_of(Protocol protocol) {
    constexpr decltype(&launch_ll128) kLaunchers[] = {launch_ll128, launch_lamport, launch_simple, launch_lamport_bf16};
    return kLaunchers[static_cast<int>(protocol)];
}

// The memory of one operation on all ranks, on the host and on the device, with poison around each tensor.
class Memory {
public:
    Memory(const Case& now, int world) : case_(now), world_(world) {
        const int64_t piece = now.numel * now.element_bytes();
        input_bytes_ = now.algorithm == Algorithm::kReduceScatter ? world * piece : piece;
        out_bytes_ = now.algorithm == Algorithm::kAllGather ? world * piece : piece;
        for (int rank = 0; rank < world; ++rank) {
            begins_.push_back(size_);
            if (now.is_in_place) {
                // The smaller of the two is the rank's piece of the other one.
                const int64_t whole = place(std::max(input_bytes_, out_bytes_), now.out_offset);
                inputs_.push_back(whole + (now.algorithm == Algorithm::kAllGather ? rank * piece : 0));
                outs_.push_back(whole + (now.algorithm == Algorithm::kReduceScatter ? rank * piece : 0));
            } else {
                inputs_.push_back(place(input_bytes_, now.input_offset));
                outs_.push_back(place(out_bytes_, now.out_offset));
            }
        }
        begins_.push_back(size_);
        host_.resize(size_);
        device_.emplace(size_);
    }

    const Case& test_case() const { return case_; }
    int world() const { return world_; }
    int64_t input_bytes() const { return input_bytes_; }
    int64_t out_bytes() const { return out_bytes_; }
    // Where in all of the memory a rank's tensors begin, and where the memory of a rank ends.
    int64_t input_at(int rank) const { return inputs_[rank]; }
    int64_t out_at(int rank) const { return outs_[rank]; }
    int64_t begin_of(int rank) const { return begins_[rank]; }
    int64_t end_of(int rank) const { return begins_[rank + 1]; }

    // What was on the device before the operation.
    const std::vector<char>& host() const { return host_; }
    // fill(element): the bytes of an element of an input.
    template <typename Function>
    void refill(const Function& fill) {
        std::fill(host_.begin(), host_.end(), static_cast<char>(0xA5));
        for (const int64_t input : inputs_) {
            for (int64_t i = 0; i < input_bytes_; i += case_.element_bytes()) fill(&host_[input + i]);
        }
        device_->write(0, host_.data(), host_.size());
    }
    std::vector<char> download() const {
        std::vector<char> memory(size_);
        device_->read(0, memory.data(), memory.size());
        return memory;
    }

    Fingerprint fingerprint() const {
        const Op op = case_.algorithm == Algorithm::kReduceScatter ? Op::kReduceScatter
                      : case_.algorithm == Algorithm::kAllGather   ? Op::kAllGather
                                                                   : Op::kAllReduce;
        return {{op, case_.reduction, static_cast<uint8_t>(case_.element)},
                {input_bytes_ / case_.element_bytes(), case_.dim, case_.before, case_.behind}};
    }
    // Where tensors of all ranks' pools are.
    char* pool() const { return device_->at(0); }
    LaunchArgs args(int rank, int blocks, int launch) const {
        const int64_t piece = std::min(input_bytes_, out_bytes_);
        LaunchArgs args{};
        args.count = units_in(case_.protocol, piece);
        // Some ranks have their outputs in the pool, some have not.
        args.pool_offset = (case_.in_pool >> rank & 1) != 0 ? outs_[rank] : -1;
        args.input = {device_->at(inputs_[rank]), input_bytes_, 0, input_bytes_};
        args.out = {device_->at(outs_[rank]), out_bytes_, 0, out_bytes_};
        args.algorithm = case_.algorithm;
        if (case_.algorithm == Algorithm::kTwoShot) {
            args.count = (args.count + world_ - 1) / world_;
            args.input.stride = args.input.piece = args.out.stride = args.out.piece =
                args.count * unit_bytes(case_.protocol);
        } else if (case_.algorithm == Algorithm::kReduceScatter) {
            args.input.stride = args.input.piece = piece;
        } else if (case_.algorithm == Algorithm::kAllGather) {
            args.out.stride = args.out.piece = piece;
        }
        args.fingerprint = pack(fingerprint());
        args.launch = launch;
        args.blocks = blocks;
        args.element = case_.element;
        args.reduction = case_.reduction;
        args.scale = case_.scale;
        args.starts_early = launch % 4 == 1;  // half of them
        const int64_t slot_bytes = Ranks::slot_bytes(world_);
        if (args.count > units_of_slot(case_.protocol, args.algorithm, {slot_bytes, slot_bytes, slot_bytes})) {
            throw std::length_error("slot too small");
        }
        return args;
    }

private:
    static constexpr int64_t kPoison = 64, kBoundary = 256;

    // Room for a tensor with poison on both sides.
    int64_t place(int64_t bytes, int64_t offset) {
        const int64_t begin = size_ + kBoundary + offset;
        size_ = (begin + bytes + kPoison + kBoundary - 1) / kBoundary * kBoundary;
        return begin;
    }

    Case case_;
    int world_;
    int64_t input_bytes_, out_bytes_, size_ = 0;
    std::vector<int64_t> begins_, inputs_, outs_;
    std::vector<char> host_;
    std::optional<Buffer> device_;
};

inline DType dtype_of(Element element) {
    return element == Element::kFloat32   ? DType::kFloat32
           : element == Element::kFloat16 ? DType::kFloat16
                                          : DType::kBFloat16;
}

inline uint64_t random_special(const multi_tensor::Format& format, std::mt19937_64& generator) {
    const uint64_t sign = generator() % 2 ? format.sign() : 0, any = generator() & format.fraction_mask();
    switch (generator() % 6) {
        case 0:
            return sign;
        case 1:
            return sign | any;  // subnormal
        case 2:
            return sign | format.infinity();
        case 3:
            return sign | format.infinity() | any;
        case 4:
            return format.sign() | format.infinity() | format.fraction_mask();  // equals the sentinel
        default:
            return sign | (format.infinity() - 1);  // the largest number
    }
}

// Fresh random inputs of all ranks.
inline void refill(Memory& memory, std::mt19937_64& generator) {
    const Case now = memory.test_case();
    const multi_tensor::Format format = multi_tensor::format_of(dtype_of(now.element));
    memory.refill([&](char* place) {
        uint64_t bits = generator();
        if (now.element != Element::kBytes) {
            // Zeros meet zeros, and numbers meet NaN, in a part of the elements alone.
            const bool is_special = now.is_special && generator() % 3 != 0;
            bits = is_special ? random_special(format, generator) : multi_tensor::random_finite(format, generator);
        }
        std::memcpy(place, &bits, now.element_bytes());
    });
}

// A sequence of kernels in a CUDA graph of their own.
class CapturedGraph {
public:
    template <typename Function>
    CapturedGraph(cudaStream_t stream, const Function& launch) {
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        launch();
        check(cudaStreamEndCapture(stream, &graph));
        check(cudaGraphInstantiate(&executable, graph, 0));
        executable_.reset(executable);
        check(cudaGraphDestroy(graph));
        check(cudaGraphUpload(executable, stream));
        check(cudaStreamSynchronize(stream));
    }
    void launch(cudaStream_t stream) const { check(cudaGraphLaunch(executable_.get(), stream)); }

private:
    struct Destroy {
        void operator()(cudaGraphExec_t graph) const { EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess); }
    };
    std::unique_ptr<CUgraphExec_st, Destroy> executable_;
};

// Seconds until all that was launched is done.
inline double seconds_to_finish() {
    const auto start = std::chrono::steady_clock::now();
    check(cudaDeviceSynchronize());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace te_graph::collectives
