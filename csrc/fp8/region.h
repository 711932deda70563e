// Which fp8_autocast this thread is in.
#pragma once

#include <cstdint>

namespace te_graph::fp8 {

// A number for all that modules go by in a region; 0 outside of one. Equal regions have one number.
int64_t region();
void set_region(int64_t number);

// A layer is called that may compute in FP8. What is captured on this thread, if anything, runs eagerly in checkpoints;
// it computes as the present region says if that `began_before` the capture.
void note_call(bool began_before);

}  // namespace te_graph::fp8
