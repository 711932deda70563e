#include "multi_tensor/check_distinct.h"

#include <c10/util/Exception.h>

#include <bit>
#include <vector>

namespace te_graph::multi_tensor {
namespace {

// A set of addresses.
class Addresses {
public:
    explicit Addresses(size_t count) : slots_(std::bit_ceil(2 * count + 1)) {}

    // False if it was there before.
    bool insert(const void* address) {
        const size_t slot = find(address);
        const bool is_new = slots_[slot] == nullptr;
        slots_[slot] = address;
        return is_new;
    }
    bool contains(const void* address) const { return slots_[find(address)] != nullptr; }

private:
    size_t find(const void* address) const {
        // Addresses of tensors are multiples of 512 mostly.
        size_t slot = (reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15u >> 20) & (slots_.size() - 1);
        while (slots_[slot] != nullptr && slots_[slot] != address) slot = (slot + 1) & (slots_.size() - 1);
        return slot;
    }
    std::vector<const void*> slots_;
};

}  // namespace

void check_distinct(const char* op, at::TensorList written, at::TensorList read) {
    Addresses addresses(written.size());
    for (size_t i = 0; i < written.size(); ++i) {
        TORCH_CHECK_VALUE(written[i].numel() == 0 || addresses.insert(written[i].const_data_ptr()), op, ": tensor ", i,
                          " is in the list of what is written already, and would be changed twice");
    }
    for (size_t i = 0; i < read.size(); ++i) {
        TORCH_CHECK_VALUE(read[i].numel() == 0 || !addresses.contains(read[i].const_data_ptr()), op, ": source ", i,
                          " has the memory of a destination");
    }
}

}  // namespace te_graph::multi_tensor
