// Device memory for the tests of kernels.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "accumulate_cases.h"

namespace te_graph::multi_tensor {

inline void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

// Device memory.
class Buffer {
public:
    explicit Buffer(size_t bytes) : bytes_(bytes) {
        void* memory = nullptr;
        check(cudaMalloc(&memory, std::max<size_t>(bytes, 1)));
        memory_.reset(memory);
    }
    Buffer(const void* host, size_t bytes) : Buffer(bytes) { write(0, host, bytes); }

    char* at(size_t byte) const { return static_cast<char*>(memory_.get()) + byte; }
    void write(size_t byte, const void* host, size_t bytes) const {
        check(cudaMemcpy(at(byte), host, bytes, cudaMemcpyHostToDevice));
        check(cudaDeviceSynchronize());  // copies of pageable memory may return early, and other streams do not wait
    }
    void read(size_t byte, void* host, size_t bytes) const {
        check(cudaMemcpy(host, at(byte), bytes, cudaMemcpyDeviceToHost));
    }
    void fill(int value) const { check(cudaMemset(memory_.get(), value, bytes_)); }

private:
    struct Free {
        void operator()(void* memory) const { EXPECT_EQ(cudaFree(memory), cudaSuccess); }
    };
    size_t bytes_;
    std::unique_ptr<void, Free> memory_;
};

template <typename T>
Buffer upload(const std::vector<T>& values) {
    return {values.data(), values.size() * sizeof(T)};
}

// Tensors of the host with copies on the device, poison included: addresses are aligned alike on both.
class DeviceTensor {
public:
    explicit DeviceTensor(const GuardedTensor& host)
        : buffer_(host.memory(), host.bytes()), first_(host.first_byte()) {}
    void* data() const { return buffer_.at(first_); }
    GuardedTensor download(const GuardedTensor& like) const {
        GuardedTensor host = like;
        buffer_.read(0, host.memory(), host.bytes());
        return host;
    }

private:
    Buffer buffer_;
    size_t first_;
};

// Entries in device memory with their chunks.
class DeviceWork {
public:
    explicit DeviceWork(const std::vector<TableEntry>& entries)
        : table_(upload(entries)), chunks_(upload(chunks_of(entries))) {
        num_chunks_ = static_cast<int64_t>(chunks_of(entries).size());
    }
    TensorTable tensors() const {
        return {reinterpret_cast<const TableEntry*>(table_.at(0)), 0, reinterpret_cast<const Chunk*>(chunks_.at(0)),
                num_chunks_};
    }

private:
    static std::vector<Chunk> chunks_of(const std::vector<TableEntry>& entries) {
        std::vector<int64_t> numels;
        for (const TableEntry& entry : entries) numels.push_back(entry.numel);
        return make_chunks(numels);
    }
    Buffer table_, chunks_;
    int64_t num_chunks_;
};

}  // namespace te_graph::multi_tensor
