#include "collectives/operation.h"

#include <c10/core/ScalarType.h>

#include <sstream>

namespace te_graph::collectives {

std::string describe(const Signature& signature) {
    static constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "an unknown operation"};
    std::ostringstream text;
    text << kNames[static_cast<int>(signature.op) & 3];
    if (signature.op != Op::kAllGather) text << (signature.reduction == Reduction::kSum ? " (sum)" : " (max)");
    text << " of " << signature.numel << ' ';
    if (signature.dtype < static_cast<uint8_t>(c10::ScalarType::NumOptions)) {
        text << c10::toString(static_cast<c10::ScalarType>(signature.dtype));
    } else {
        text << "elements of unknown dtype";
    }
    return text.str();
}

}  // namespace te_graph::collectives
