// The reasons for which a forward is not replayed.
#pragma once

#include <cstddef>
#include <string>

namespace te_graph::graphs {

// Why a forward cannot be replayed. What that means is the caller's choice: an error, an eager call, another capture.
struct ReplayMiss {
    enum class Kind {
        kCapturing,      // the current stream is being captured
        kMode,           // a mode wants to see operations that a replay does not have
        kCheckpoint,     // a checkpoint around the call would save nothing
        kArguments,      // the tensors are not like those at capture
        kDiscernible,    // the tensors are, but eager execution could tell the call from the captured one
        kCircumstances,  // something that the graph takes for granted has changed
        kExhausted,      // every slot waits for its backward
        kUnlinked,       // in a chain: the input is not where the predecessor's results are
        kEntangled,      // an argument that the call changes in place is part of something else
    };
    Kind kind;
    std::string message;
};

// What a message says of a call with another number of arguments by position than the captured one.
inline std::string difference_of_counts(size_t expected, size_t got) {
    return "expected " + std::to_string(expected) + " positional argument" + (expected == 1 ? "" : "s") +
           " as at capture, got " + std::to_string(got);
}

}  // namespace te_graph::graphs
