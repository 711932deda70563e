#include "collectives/operation.h"

#include <c10/core/ScalarType.h>

#include <sstream>

namespace te_graph::collectives {
namespace {

// of: what stands before the dtype.
std::string describe(const OperationKind& kind, const std::string& of) {
    static constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "an unknown operation"};
    std::ostringstream text;
    text << kNames[static_cast<int>(kind.op) & 3];
    if (kind.op != Op::kAllGather) text << (kind.reduction == Reduction::kSum ? " (sum)" : " (max)");
    text << " of " << of;
    if (kind.dtype < static_cast<uint8_t>(c10::ScalarType::NumOptions)) {
        text << c10::toString(static_cast<c10::ScalarType>(kind.dtype));
    } else {
        text << "elements of unknown dtype";
    }
    return text.str();
}

}  // namespace

std::string describe(const OperationKind& kind) { return describe(kind, ""); }

std::string describe(const Signature& signature) {
    const Extents& extents = signature.extents;
    std::ostringstream text;
    text << describe(signature.kind, std::to_string(extents.numel) + ' ');
    if (signature.kind.op != Op::kAllReduce) {
        text << " along dim " << extents.dim << " of size " << extents.size() << " (" << extents.before << " before, "
             << extents.behind << " behind)";
    }
    return text.str();
}

}  // namespace te_graph::collectives
