// Random inputs for tests.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>

namespace te_graph {

// A generator that differs between tests and repeats in each.
inline std::mt19937_64 seeded_generator() {
    const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
    return std::mt19937_64(std::hash<std::string>{}(std::string(test->test_suite_name()) + test->name()));
}

}  // namespace te_graph
