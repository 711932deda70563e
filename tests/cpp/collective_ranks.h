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

#include "collectives/tuning.h"
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

// What a rank has beside its peers: all as on a GPU of its own.
class Rank {
public:
    Rank(int64_t half_bytes, uint64_t first_sequence)
        : half_bytes_(half_bytes), inbox_(sizeof(Mailbox) + 6 * half_bytes), control_(sizeof(Control)) {
        inbox_.fill(0);
        const std::vector<char> empty(2 * half_bytes, static_cast<char>(kEmptyByte));
        inbox_.write(sizeof(Mailbox) + 2 * half_bytes, empty.data(), empty.size());
        void* memory = nullptr;
        check(cudaHostAlloc(&memory, sizeof(Record), cudaHostAllocMapped));
        record_.reset(new (memory) Record{});
        check(cudaHostGetDevicePointer(&memory, record_.get(), 0));
        Control control{};
        control.state = first_sequence << kSequenceShift;
        control.record = static_cast<Record*>(memory);
        control_.write(0, &control, sizeof(control));
    }

    char* inbox() const { return inbox_.at(0); }
    // Whether all data that came has been taken.
    bool is_empty() const {
        std::vector<char> data(2 * half_bytes_);
        inbox_.read(sizeof(Mailbox) + 2 * half_bytes_, data.data(), data.size());
        return std::all_of(data.begin(), data.end(), [](char byte) { return byte == static_cast<char>(kEmptyByte); });
    }
    Control* control_on_device() const { return reinterpret_cast<Control*>(control_.at(0)); }
    cudaStream_t stream() const { return stream_.get(); }

    const Record& record() const { return *record_; }
    Control control() const {
        Control control;
        control_.read(0, &control, sizeof(control));
        return control;
    }
    Mailbox mailbox() const {
        Mailbox mailbox;
        inbox_.read(0, &mailbox, sizeof(mailbox));
        return mailbox;
    }
    uint64_t abort() const { return mailbox().abort; }
    void set_timeout(uint64_t ns) const { control_.write(offsetof(Control, timeout_ns), &ns, sizeof(ns)); }

private:
    struct FreeHost {
        void operator()(Record* record) const { EXPECT_EQ(cudaFreeHost(record), cudaSuccess); }
    };
    int64_t half_bytes_;
    Buffer inbox_, control_;
    std::unique_ptr<Record, FreeHost> record_;
    Stream stream_;
};

class Ranks {
public:
    // Of each way. Halves of up to seven slots are multiples of a line.
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
        for (int p = 0; p < world(); ++p) peers.inbox[p] = ranks_[p]->inbox();
        peers.control = ranks_[rank]->control_on_device();
        peers.line_slot_bytes = peers.data_slot_bytes = peers.flag_slot_bytes = slot_bytes(world());
        peers.rank = rank;
        peers.world = world();
        return peers;
    }
    void set_timeout(uint64_t ns) const {
        for (const auto& rank : ranks_) rank->set_timeout(ns);
    }

    // All ranks have finished this many operations, and none has given up.
    void expect_finished(int operations) const {
        check(cudaDeviceSynchronize());
        for (int rank = 0; rank < world(); ++rank) {
            const Control control = ranks_[rank]->control();
            EXPECT_EQ(control.state, (first_sequence_ + operations) << kSequenceShift) << "rank " << rank;
            EXPECT_EQ(std::ranges::count(control.taken, 0u), std::ssize(control.taken)) << "rank " << rank;
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

enum class Kind { kOneStep, kTwoSteps, kReduceScatter, kAllGather };
constexpr Kind kKinds[] = {Kind::kOneStep, Kind::kTwoSteps, Kind::kReduceScatter, Kind::kAllGather};

struct Case {
    Kind kind;
    Element element = Element::kFloat32;
    Reduction reduction = Reduction::kSum;
    int64_t numel;             // all-reduce: of all, else of the piece of a rank
    int64_t input_offset = 0;  // in bytes, behind a boundary of 256 bytes
    int64_t out_offset = 0;
    bool is_in_place = false;
    Way way = Way::kLines;
    int in_pool = 0;          // bit r: rank r's output lies where its peers can write it
    bool is_special = false;  // zeros, NaN, infinities and subnormals among the inputs
    // That ranks compare; what moves is the same.
    int64_t dim = 0, before = 1, behind = 1;

    int64_t element_bytes() const { return element == Element::kFloat32 ? 4 : element == Element::kBytes ? 1 : 2; }
};

inline std::ostream& operator<<(std::ostream& out, const Case& now) {
    constexpr const char* kKindNames[] = {"all-reduce of one step", "all-reduce of two steps", "reduce-scatter",
                                          "all-gather"};
    constexpr const char* kElementNames[] = {"fp32", "fp16", "bf16", "bytes"};
    constexpr const char* kWayNames[] = {", by lines", ", by words", ", by tiles, in pools "};
    out << kKindNames[static_cast<int>(now.kind)] << (now.reduction == Reduction::kMax ? " (max) of " : " of ")
        << now.numel << ' ' << kElementNames[static_cast<int>(now.element)] << ", input at " << now.input_offset
        << ", out at " << now.out_offset << (now.is_in_place ? ", in place" : "")
        << (now.is_special ? ", special values" : "");
    if (now.dim > 0) out << ", along dim " << now.dim << " behind " << now.before << ", before " << now.behind;
    out << kWayNames[static_cast<int>(now.way)];
    return now.way == Way::kTiles ? out << now.in_pool : out;
}

// Elements and reductions that a kind of operation is made for, and the ways that serve it.
inline std::vector<Case> cases_of(Kind kind, int64_t numel) {
    std::vector<Case> cases;
    if (kind == Kind::kAllGather) {
        cases = {{.kind = kind, .element = Element::kBytes, .numel = numel}};
    } else {
        cases = {{.kind = kind, .numel = numel},
                 {.kind = kind, .reduction = Reduction::kMax, .numel = numel},
                 {.kind = kind, .element = Element::kFloat16, .numel = numel},
                 {.kind = kind, .element = Element::kBFloat16, .numel = numel}};
    }
    const size_t count = cases.size();
    for (size_t i = 0; i < count; ++i) {
        if (kind != Kind::kAllGather) {
            cases.push_back(cases[i]);
            cases.back().way = Way::kWords;
            continue;
        }
        // The outputs of no, some and all ranks in pools.
        for (const int in_pool : {0, 0b01010101, 0xFF}) {
            cases.push_back(cases[i]);
            cases.back().way = Way::kTiles;
            cases.back().in_pool = in_pool;
        }
    }
    return cases;
}
// Of up to 2^largest elements.
inline Case random_case(int largest, std::mt19937_64& generator) {
    const auto numel = static_cast<int64_t>(1 + generator() % (1ull << generator() % (largest + 1)));
    const std::vector<Case> cases = cases_of(kKinds[generator() % 4], numel);
    Case now = cases[generator() % cases.size()];
    now.input_offset = static_cast<int64_t>(generator() % 3) * now.element_bytes();
    now.out_offset = static_cast<int64_t>(generator() % 3) * now.element_bytes();
    now.is_in_place = generator() % 3 == 0;
    return now;
}

inline auto launcher_of(Way way) {
    constexpr decltype(&launch_lines) kLaunchers[] = {launch_lines, launch_words, launch_tiles};
    return kLaunchers[static_cast<int>(way)];
}

// The memory of one operation on all ranks, on the host and on the device, with poison around each tensor.
class Memory {
public:
    Memory(const Case& now, int world) : case_(now), world_(world) {
        const int64_t piece = now.numel * now.element_bytes();
        input_bytes_ = now.kind == Kind::kReduceScatter ? world * piece : piece;
        out_bytes_ = now.kind == Kind::kAllGather ? world * piece : piece;
        for (int rank = 0; rank < world; ++rank) {
            begins_.push_back(size_);
            if (now.is_in_place) {
                // The smaller of the two is the rank's piece of the other one.
                const int64_t whole = place(std::max(input_bytes_, out_bytes_), now.out_offset);
                inputs_.push_back(whole + (now.kind == Kind::kAllGather ? rank * piece : 0));
                outs_.push_back(whole + (now.kind == Kind::kReduceScatter ? rank * piece : 0));
            } else {
                inputs_.push_back(place(input_bytes_, now.input_offset));
                outs_.push_back(place(out_bytes_, now.out_offset));
            }
        }
        begins_.push_back(size_);
        host_.resize(size_);
        device_.emplace(size_);
    }

    const Case& kind_of_case() const { return case_; }
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

    Signature signature() const {
        const Op op = case_.kind == Kind::kReduceScatter ? Op::kReduceScatter
                      : case_.kind == Kind::kAllGather   ? Op::kAllGather
                                                         : Op::kAllReduce;
        return {{op, case_.reduction, static_cast<uint8_t>(case_.element)},
                {input_bytes_ / case_.element_bytes(), case_.dim, case_.before, case_.behind}};
    }
    // Where tensors of all ranks' pools are.
    char* pool() const { return device_->at(0); }
    Job job(int rank, int blocks, int launch) const {
        const int64_t piece = std::min(input_bytes_, out_bytes_);
        Job job{};
        job.count = units_in(case_.way, piece);
        // Some ranks have their outputs in the pool, some have not.
        job.pool_offset = (case_.in_pool >> rank & 1) != 0 ? outs_[rank] : -1;
        job.input = {device_->at(inputs_[rank]), input_bytes_, 0, input_bytes_};
        job.out = {device_->at(outs_[rank]), out_bytes_, 0, out_bytes_};
        job.steps = Steps::kReduce;
        if (case_.kind == Kind::kTwoSteps) {
            job.steps = Steps::kReduceSend;
            job.count = (job.count + world_ - 1) / world_;
            job.input.stride = job.input.piece = job.out.stride = job.out.piece = job.count * unit_bytes(case_.way);
        } else if (case_.kind == Kind::kReduceScatter) {
            job.steps = Steps::kScatter;
            job.input.stride = job.input.piece = piece;
        } else if (case_.kind == Kind::kAllGather) {
            job.steps = Steps::kSend;
            job.out.stride = job.out.piece = piece;
        }
        job.signature = pack(signature());
        job.launch = launch;
        job.blocks = blocks;
        job.element = case_.element;
        job.reduction = case_.reduction;
        job.starts_early = launch % 4 == 1;  // half of them
        const int64_t slot_bytes = Ranks::slot_bytes(world_);
        if (job.count > units_of_slot(case_.way, job.steps, {slot_bytes, slot_bytes, slot_bytes})) {
            throw std::length_error("slot too small");
        }
        return job;
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

inline multi_tensor::DType dtype_of(Element element) {
    return element == Element::kFloat32   ? multi_tensor::DType::kFloat32
           : element == Element::kFloat16 ? multi_tensor::DType::kFloat16
                                          : multi_tensor::DType::kBFloat16;
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
            return format.sign() | format.infinity() | format.fraction_mask();  // looks like an empty word
        default:
            return sign | (format.infinity() - 1);  // the largest number
    }
}

// Fresh random inputs of all ranks.
inline void refill(Memory& memory, std::mt19937_64& generator) {
    const Case now = memory.kind_of_case();
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
