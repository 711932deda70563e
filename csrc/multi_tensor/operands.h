// The tensors of few elements that an op has beside its lists: numbers, flags, a partial. None may lie in memory that
// the launch writes (common/arguments_apart.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <vector>

#include "common/arguments_apart.h"
#include "common/check.h"
#include "common/no_derivative.h"
#include "multi_tensor/memory_ranges.h"
#include "multi_tensor/table.h"
#include "multi_tensor/tensor_entries.h"

namespace te_graph::multi_tensor {

constexpr size_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

class Operands {
public:
    // Raises if one that is written shares memory with another, is not to be written, or is tracked by autograd, which
    // does not see what is called past it.
    Operands(const char* op, std::initializer_list<Argument> operands) : op_(op) {
        check_apart(op, operands);
        for (const Argument& operand : operands) {
            if (operand.tensor == nullptr) continue;
            if (operand.is_written) check_not_followed(op, operand.name, *operand.tensor, true);
            operands_[count_++] = {operand.tensor, span_of(*operand.tensor), operand.name, operand.is_written};
        }
    }

    // Raises if one lies where these entries are written, or is written where they are read. Copies of tensors with
    // gaps have nothing in common with it, but what is written into the tensors afterwards would take its place.
    void check_beside(const TensorEntries& list, bool sources_are_written) const {
        const std::vector<TableEntry>& entries = list.entries();
        for (const Operand* operand = operands_.begin(); operand != operands_.begin() + count_; ++operand) {
            const bool is_beside_sources = sources_are_written || operand->is_written;
            for (size_t i = 0; i < entries.size(); ++i) {
                const TableEntry& entry = entries[i];
                // At first with the largest of element sizes, which is one comparison for nearly all.
                const size_t most = static_cast<size_t>(entry.numel) * sizeof(double);
                if (operand->overlaps(entry.destination, most) &&
                    operand->overlaps(entry.destination, entry.numel * size_of(entry.destination_dtype))) {
                    fail(*operand, "tensor", i);
                }
                if (is_beside_sources && entry.source != nullptr && operand->overlaps(entry.source, most) &&
                    operand->overlaps(entry.source, entry.numel * size_of(entry.source_dtype))) {
                    fail(*operand, "source", i);
                }
            }
            for (const TensorEntries::Copy& copy : list.copies()) {
                if (copy.target && share_memory(*operand->tensor, *copy.target)) fail(*operand, copy.list, copy.i);
            }
        }
    }
    void check_beside(const MemoryRanges& written, const MemoryRanges& sources, bool sources_are_written) const {
        for (const Operand* operand = operands_.begin(); operand != operands_.begin() + count_; ++operand) {
            if (const auto i = written.find(operand->span.begin, operand->span.size())) fail(*operand, "tensor", *i);
            if (!sources_are_written && !operand->is_written) continue;
            if (const auto i = sources.find(operand->span.begin, operand->span.size())) fail(*operand, "source", *i);
        }
    }

private:
    struct Operand {
        const at::Tensor* tensor;  // the caller's
        Span span;
        const char* name;
        bool is_written;

        bool overlaps(const void* data, size_t size) const {
            const auto* const begin = static_cast<const char*>(data);
            return span.overlaps({begin, begin + size});
        }
    };

    [[noreturn]] void fail(const Operand& operand, const char* list, size_t i) const {
        C10_THROW_ERROR(ValueError,
                        c10::str(op_, ": expected ", operand.name, " apart from the lists, got one in the memory of ",
                                 list, " ", i, "; clone() it first"));
    }

    const char* op_;
    std::array<Operand, 4> operands_;
    size_t count_ = 0;
};

}  // namespace te_graph::multi_tensor
