// Entry of te_graph_torch_tests, which a Python process loads: the code under test calls into Python and
// libtorch_python. Called without the GIL, as C++ that runs beside Python is; a test that touches Python objects takes
// it.
#include <gtest/gtest.h>

extern "C" __attribute__((visibility("default"))) int run_tests() {
    testing::InitGoogleTest();
    return RUN_ALL_TESTS();
}
