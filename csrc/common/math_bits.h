// Tensors whose memory is still to be conjugated or negated, as arguments of ops that write.
#pragma once

#include <torch/library.h>

namespace te_graph {

// The Conjugate and Negative kernel of ops that write. Such tensors are copied; what was written into a copy is copied
// back. torch's own fallback, which other ops have, takes what it copies back from the op's result, and an op that
// mutates has none.
torch::CppFunction with_math_bits();

}  // namespace te_graph
