// Which fp8_autocast this thread is in.
#pragma once

#include <cstdint>

namespace te_graph::fp8 {

// A number for all that modules go by in a region; 0 outside of one. Equal regions have one number.
int64_t region();
void set_region(int64_t number);

// What is captured on this thread, if anything, computes as the present region says, which began before the capture.
void note_region();

}  // namespace te_graph::fp8
