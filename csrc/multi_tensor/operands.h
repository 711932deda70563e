// The tensors of few elements that an op has beside its lists: numbers, flags, a partial.
//
// Blocks of one launch run in any order. Where one of these lies in memory that the launch writes, some blocks would
// read it before and some after.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <initializer_list>
#include <optional>

#include "common/check.h"
#include "multi_tensor/extents.h"
#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

constexpr size_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

class Operands {
public:
    struct Operand {
        Operand(const char* name, const at::Tensor& tensor, bool is_written)
            : name(name), tensor(&tensor), is_written(is_written) {}
        Operand(const char* name, const std::optional<at::Tensor>& tensor, bool is_written)
            : name(name), tensor(tensor ? &*tensor : nullptr), is_written(is_written) {}

        const char* name;
        const at::Tensor* tensor;  // nullptr: there is none
        bool is_written;
    };

    // Raises if one that is written shares memory with another, or is not to be written.
    Operands(const char* op, std::initializer_list<Operand> operands) : op_(op) {
        for (const Operand& operand : operands) {
            if (operand.tensor == nullptr) continue;
            if (operand.is_written) check_writable(op, operand.name, *operand.tensor);
            add(operand);
        }
    }

    // Raises if one lies where these entries are written, or is written where they are read. Entries that are copies of
    // tensors with gaps have nothing in common with it: their tensors are written after the launch.
    void check_beside(const std::vector<Entry>& entries, bool sources_are_written) const {
        for (const Place* place = places_.begin(); place != places_.begin() + count_; ++place) {
            const bool is_beside_sources = sources_are_written || place->is_written;
            for (size_t i = 0; i < entries.size(); ++i) {
                const Entry& entry = entries[i];
                // At first with the largest of element sizes, which is one comparison for nearly all.
                const size_t most = static_cast<size_t>(entry.numel) * sizeof(double);
                if (place->overlaps(entry.destination, most) &&
                    place->overlaps(entry.destination, entry.numel * size_of(entry.destination_dtype))) {
                    fail(*place, "tensor", i);
                }
                if (is_beside_sources && entry.source != nullptr && place->overlaps(entry.source, most) &&
                    place->overlaps(entry.source, entry.numel * size_of(entry.source_dtype))) {
                    fail(*place, "source", i);
                }
            }
        }
    }
    void check_beside(const Extents& written, const Extents& sources, bool sources_are_written) const {
        for (const Place* place = places_.begin(); place != places_.begin() + count_; ++place) {
            const auto size = static_cast<size_t>(place->end - place->begin);
            if (const auto i = written.find(place->begin, size)) fail(*place, "tensor", *i);
            if (!sources_are_written && !place->is_written) continue;
            if (const auto i = sources.find(place->begin, size)) fail(*place, "source", *i);
        }
    }

private:
    struct Place {
        const char* name;
        const char *begin, *end;
        bool is_written;

        bool overlaps(const void* data, size_t size) const {
            const auto* const other = static_cast<const char*>(data);
            return begin < other + size && other < end;
        }
    };

    void add(const Operand& operand) {
        const auto* const begin = static_cast<const char*>(operand.tensor->const_data_ptr());
        const Place place{operand.name, begin, begin + operand.tensor->nbytes(), operand.is_written};
        for (const Place* other = places_.begin(); other != places_.begin() + count_; ++other) {
            TORCH_CHECK_VALUE(!(place.is_written || other->is_written) ||
                                  !place.overlaps(other->begin, static_cast<size_t>(other->end - other->begin)),
                              op_, ": expected ", other->name, " and ", place.name,
                              " to be two tensors, got the same memory for both");
        }
        places_[count_++] = place;
    }

    [[noreturn]] void fail(const Place& place, const char* list, size_t i) const {
        C10_THROW_ERROR(ValueError,
                        c10::str(op_, ": expected ", place.name, " apart from the lists, got one in the memory of ",
                                 list, " ", i, "; clone() it first"));
    }

    const char* op_;
    std::array<Place, 4> places_;
    size_t count_ = 0;
};

}  // namespace te_graph::multi_tensor
