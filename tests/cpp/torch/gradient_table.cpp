// GradientTable: what the host says of each gradient, and when the table that the captured launch reads is changed.
#include "graphs/callables/gradient_table.h"

#include <ATen/ops/_neg_view.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

namespace te_graph::graphs {
namespace {

using multi_tensor::Chunk;
using multi_tensor::Mode;
using multi_tensor::TableEntry;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

// The table as the launch sees it.
TableEntry sent(const GradientTable& table, size_t index) {
    TableEntry entry;
    std::memcpy(&entry, static_cast<const TableEntry*>(table.entries().const_data_ptr()) + index, sizeof(entry));
    return entry;
}

void replay(const GradientTable& table) {
    multi_tensor::accumulate_cpu({static_cast<const TableEntry*>(table.entries().const_data_ptr()), 0,
                                  static_cast<const Chunk*>(table.chunks().const_data_ptr()), table.chunks().size(0)},
                                 {});
}

GradientTable float_table(const std::vector<int64_t>& sizes) {
    const std::vector<at::ScalarType> dtypes(sizes.size(), at::kFloat);
    return {sizes, dtypes, dtypes, at::kCPU};
}

TEST(GradientTable, StartsWithEveryEntrySkipped) {
    const GradientTable table = float_table({5, 3});
    EXPECT_EQ(table.size(), 2u);
    EXPECT_EQ(table.entries().sizes(), (at::IntArrayRef{2, 4}));
    EXPECT_EQ(table.entries().scalar_type(), at::kLong);
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(sent(table, i).mode, Mode::kSkip);
    replay(table);  // reads no gradient and writes none
    EXPECT_EQ(table.uploads(), 0);
}

TEST(GradientTable, ListsTheChunksOfAllEntries) {
    const std::vector<int64_t> sizes{multi_tensor::kChunkElements + 1, 0, 1};
    const GradientTable table = float_table(sizes);
    const auto expected = multi_tensor::make_chunks(sizes);
    ASSERT_EQ(table.chunks().sizes(), (at::IntArrayRef{3, 2}));
    EXPECT_EQ(table.chunks().scalar_type(), at::kInt);
    EXPECT_EQ(std::memcmp(table.chunks().const_data_ptr(), expected.data(), 3 * sizeof(Chunk)), 0);
}

TEST(GradientTable, WithoutEntriesIsEmptyAndStillWorks) {
    GradientTable table = float_table({});
    table.bind({});
    table.upload();
    replay(table);
    EXPECT_EQ(table.entries().sizes(), (at::IntArrayRef{0, 4}));
    EXPECT_EQ(table.chunks().sizes(), (at::IntArrayRef{0, 2}));
    EXPECT_EQ(table.uploads(), 0);
}

TEST(GradientTable, BindWritesAddressesSizesAndDtypesAndLeavesEntriesSkipped) {
    GradientTable table({4, 6}, {at::kBFloat16, at::kDouble}, {at::kFloat, at::kDouble}, at::kCPU);
    const at::Tensor first = at::zeros({4}, at::kBFloat16), second = at::zeros({2, 3}, at::kDouble);
    table.bind({first, second});
    EXPECT_EQ(sent(table, 0).source, first.const_data_ptr());
    EXPECT_EQ(sent(table, 0).numel, 4);
    EXPECT_EQ(sent(table, 0).source_dtype, DType::kBFloat16);
    EXPECT_EQ(sent(table, 0).destination_dtype, DType::kFloat32);
    EXPECT_EQ(sent(table, 0).mode, Mode::kSkip);
    EXPECT_EQ(sent(table, 1).source, second.const_data_ptr());
    EXPECT_EQ(sent(table, 1).numel, 6);
    EXPECT_EQ(sent(table, 1).source_dtype, DType::kFloat64);
    EXPECT_EQ(sent(table, 1).destination_dtype, DType::kFloat64);
    EXPECT_EQ(table.uploads(), 0);
}

TEST(GradientTable, BindRefusesAnotherNumberOfGradients) {
    GradientTable table = float_table({4, 6});
    const auto bind_one = [&] { table.bind({at::zeros({4})}); };
    EXPECT_THAT(bind_one, ThrowsMessage<c10::ValueError>(HasSubstr("expected 2 gradients, got 1")));
}

TEST(GradientTable, BindRefusesGradientsThatAreNotOneRunOfMemoryOfTheStatedKind) {
    const auto bind = [](const at::Tensor& gradient) {
        return [=] {
            GradientTable table = float_table({6});
            table.bind({gradient});
        };
    };
    const auto refuses = ThrowsMessage<c10::ValueError>(HasSubstr("expected gradient 0 to be dense, with "));
    EXPECT_NO_THROW(bind(at::zeros({2, 3}))());
    EXPECT_NO_THROW(bind(at::zeros({3, 2}).t())());
    EXPECT_THAT(bind(at::zeros({2, 8}).slice(1, 0, 3)), refuses);
    EXPECT_THAT(bind(at::zeros({1}).expand({6})), refuses);
    EXPECT_THAT(bind(at::zeros({7})), refuses);
    EXPECT_THAT(bind(at::zeros({6}, at::kDouble)), refuses);
    EXPECT_THAT(bind(at::zeros({6}, at::kComplexFloat)), refuses);
    EXPECT_THAT(bind(at::zeros({6})._neg_view()), refuses);
}

TEST(GradientTable, BindTakesAnythingForEntriesWithoutElements) {
    GradientTable table = float_table({0});
    table.bind({at::zeros({3}, at::kLong)});
    EXPECT_EQ(sent(table, 0).source, nullptr);
}

TEST(GradientTable, TakesWhatCanBeAccumulated) {
    EXPECT_TRUE(GradientTable::takes(at::kBFloat16, at::kFloat));
    EXPECT_TRUE(GradientTable::takes(at::kComplexFloat, at::kComplexFloat));
    EXPECT_FALSE(GradientTable::takes(at::kFloat, at::kBFloat16));
    EXPECT_FALSE(GradientTable::takes(at::kComplexFloat, at::kFloat));
    EXPECT_FALSE(GradientTable::takes(at::kFloat8_e4m3fn, at::kFloat8_e4m3fn));
}

TEST(LayOut, GivesOneRunInTheOrderOfTheParameterOrOfItsMainGrad) {
    const at::Tensor wide = at::rand({4, 8}), gradient = wide.slice(1, 0, 3), none;
    for (const at::Tensor& parameter : {at::zeros({4, 3}), at::zeros({3, 4}).t(), at::zeros({4, 8}).slice(1, 0, 3)}) {
        for (const at::Tensor& main_grad : {none, at::zeros({4, 3}), at::zeros({3, 4}).t()}) {
            const at::Tensor laid = lay_out(gradient, parameter, main_grad);
            EXPECT_TRUE(is_dense(laid));
            EXPECT_TRUE(laid.equal(gradient));
            if (main_grad.defined()) {
                EXPECT_EQ(laid.strides(), main_grad.strides());
            }
        }
    }
    const at::Tensor dense = at::rand({4, 3});
    EXPECT_TRUE(lay_out(dense, at::zeros({4, 3}), none).is_same(dense));
    EXPECT_FALSE(lay_out(dense._neg_view(), at::zeros({4, 3}), none).is_neg());
}

TEST(GradientTable, AComplexElementCountsAsTwo) {
    GradientTable table({3, 5}, {at::kComplexFloat, at::kComplexDouble}, {at::kComplexFloat, at::kComplexDouble},
                        at::kCPU);
    table.bind({at::zeros({3}, at::kComplexFloat), at::zeros({5}, at::kComplexDouble)});
    EXPECT_EQ(sent(table, 0).numel, 6);
    EXPECT_EQ(sent(table, 0).source_dtype, DType::kFloat32);
    EXPECT_EQ(sent(table, 1).numel, 10);
    EXPECT_EQ(sent(table, 1).destination_dtype, DType::kFloat64);
}

TEST(GradientTable, RefusesDtypesThatCannotBeAccumulatedByName) {
    const auto make = [](at::ScalarType source, at::ScalarType destination) {
        return [=] { GradientTable({1}, {source}, {destination}, at::kCPU); };
    };
    EXPECT_THAT(make(at::kInt, at::kInt), ThrowsMessage<c10::TypeError>(HasSubstr("dtype torch.int32 cannot")));
    EXPECT_THAT(make(at::kFloat, at::kBFloat16),
                ThrowsMessage<c10::TypeError>(AllOf(HasSubstr("torch.float32"), HasSubstr("into torch.bfloat16"))));
    EXPECT_THAT(make(at::kFloat, at::kDouble),
                ThrowsMessage<c10::TypeError>(AllOf(HasSubstr("torch.float32"), HasSubstr("into torch.float64"))));
}

// A bound table of two entries with two destinations for them.
class BoundTable : public testing::Test {
protected:
    BoundTable() { table.bind({sources[0], sources[1]}); }

    const at::Tensor sources[2] = {at::rand({4}), at::rand({7})};
    const at::Tensor destinations[2] = {at::rand({4}), at::rand({7})};
    void* const memory[2] = {destinations[0].mutable_data_ptr(), destinations[1].mutable_data_ptr()};
    GradientTable table = float_table({4, 7});
};

TEST_F(BoundTable, SetSendsNothingBeforeUpload) {
    table.set(0, {Mode::kStore, memory[0]});
    EXPECT_EQ(sent(table, 0).mode, Mode::kSkip);
    EXPECT_EQ(table.uploads(), 0);
    table.upload();
    EXPECT_EQ(sent(table, 0).mode, Mode::kStore);
    EXPECT_EQ(sent(table, 0).destination, memory[0]);
    EXPECT_EQ(sent(table, 1).mode, Mode::kSkip);
    EXPECT_EQ(table.uploads(), 1);
}

TEST_F(BoundTable, UploadsAreCountedOnlyWhenAnEntryChanged) {
    table.upload();
    EXPECT_EQ(table.uploads(), 0);
    for (int replay = 0; replay < 3; ++replay) {
        table.set(0, {Mode::kStore, memory[0]});
        table.set(1, {Mode::kAdd, memory[1]});
        table.upload();
        EXPECT_EQ(table.uploads(), 1);
    }
    table.set(0, {Mode::kAdd, memory[0]});  // another mode
    table.upload();
    EXPECT_EQ(table.uploads(), 2);
    const at::Tensor other = at::zeros({7});
    table.set(1, {Mode::kAdd, other.mutable_data_ptr()});  // another destination
    table.upload();
    EXPECT_EQ(table.uploads(), 3);
    EXPECT_EQ(sent(table, 0).mode, Mode::kAdd);
    EXPECT_EQ(sent(table, 1).destination, other.const_data_ptr());
    table.upload();
    EXPECT_EQ(table.uploads(), 3);
}

TEST_F(BoundTable, TheDestinationOfASkippedEntryIsOfNoImportance) {
    table.set(0, {Mode::kSkip, memory[0]});
    table.upload();
    EXPECT_EQ(table.uploads(), 0);
    table.set(0, {Mode::kStore, memory[0]});
    table.set(0, {Mode::kSkip, nullptr});
    table.upload();
    EXPECT_EQ(sent(table, 0).mode, Mode::kSkip);
    table.set(0, {Mode::kStore, memory[0]});
    table.upload();
    EXPECT_EQ(sent(table, 0).mode, Mode::kStore);
    EXPECT_EQ(sent(table, 0).destination, memory[0]);
}

TEST_F(BoundTable, TheLastOfSeveralSetsBeforeAnUploadHolds) {
    table.set(0, {Mode::kStore, memory[1]});
    table.set(0, {Mode::kAdd, memory[0]});
    table.upload();
    EXPECT_EQ(sent(table, 0).mode, Mode::kAdd);
    EXPECT_EQ(sent(table, 0).destination, memory[0]);
}

// The same write for every entry.
auto all(Mode mode, void* destination = nullptr) {
    return [=](size_t) { return GradientTable::EntryWrite{mode, destination}; };
}

TEST(GradientTable, WithoutEntriesMatchesWhateverItIsAskedFor) {
    EXPECT_TRUE(float_table({}).matches(all(Mode::kAdd)));
}

TEST_F(BoundTable, AtFirstSkipsEveryEntryWhateverItsDestination) {
    EXPECT_TRUE(table.matches(all(Mode::kSkip)));
    EXPECT_TRUE(table.matches(all(Mode::kSkip, memory[0])));
    EXPECT_FALSE(table.matches(all(Mode::kStore, memory[0])));
    EXPECT_FALSE(table.matches(all(Mode::kAdd)));
}

TEST_F(BoundTable, MatchesWritesOnlyOnceTheyHaveBeenSent) {
    const auto writes = [&](size_t i) {
        return GradientTable::EntryWrite{i == 0 ? Mode::kStore : Mode::kAdd, memory[i]};
    };
    EXPECT_FALSE(table.matches(writes));
    for (size_t i = 0; i < 2; ++i) table.set(i, writes(i));
    EXPECT_FALSE(table.matches(writes));
    EXPECT_FALSE(table.matches(all(Mode::kSkip)));
    table.upload();
    EXPECT_TRUE(table.matches(writes));
    EXPECT_FALSE(table.matches(all(Mode::kSkip)));
}

TEST_F(BoundTable, ComparesModeAndDestinationOfEachEntry) {
    const auto wanted = [&](size_t i) { return GradientTable::EntryWrite{Mode::kAdd, memory[i]}; };
    for (size_t i = 0; i < 2; ++i) table.set(i, wanted(i));
    table.upload();
    for (size_t other = 0; other < 2; ++other) {
        const auto with = [&](GradientTable::EntryWrite write) {
            return table.matches([=, this](size_t i) { return i == other ? write : wanted(i); });
        };
        EXPECT_TRUE(with({Mode::kAdd, memory[other]}));
        EXPECT_FALSE(with({Mode::kStore, memory[other]}));
        EXPECT_FALSE(with({Mode::kSkip, memory[other]}));
        EXPECT_FALSE(with({Mode::kAdd, memory[1 - other]}));
    }
}

TEST_F(BoundTable, SetAsItAlreadyIsLeavesNothingToSend) {
    table.set(0, {Mode::kAdd, memory[0]});
    table.upload();
    table.set(0, {Mode::kAdd, memory[0]});
    table.set(1, {Mode::kSkip, memory[1]});
    EXPECT_TRUE(table.matches([&](size_t i) {
        return GradientTable::EntryWrite{i == 0 ? Mode::kAdd : Mode::kSkip, memory[i]};
    }));
    table.upload();
    EXPECT_EQ(table.uploads(), 1);
}

TEST_F(BoundTable, SetAndSetBackEndsAsItWas) {
    table.set(0, {Mode::kAdd, memory[0]});
    table.upload();
    table.set(0, {Mode::kStore, memory[1]});
    table.set(0, {Mode::kAdd, memory[0]});
    table.upload();
    EXPECT_EQ(sent(table, 0).mode, Mode::kAdd);
    EXPECT_EQ(sent(table, 0).destination, memory[0]);
    EXPECT_TRUE(table.matches([&](size_t i) {
        return GradientTable::EntryWrite{i == 0 ? Mode::kAdd : Mode::kSkip, memory[i]};
    }));
}

TEST_F(BoundTable, UploadChangesOnlyDestinationAndMode) {
    table.set(1, {Mode::kAdd, memory[1]});
    table.upload();
    const TableEntry entry = sent(table, 1);
    EXPECT_EQ(entry.source, sources[1].const_data_ptr());
    EXPECT_EQ(entry.numel, 7);
    EXPECT_EQ(entry.source_dtype, DType::kFloat32);
    EXPECT_EQ(entry.destination_dtype, DType::kFloat32);
}

TEST_F(BoundTable, ReplaysStoreThenAddThenSkipAsTold) {
    const at::Tensor untouched = destinations[1].clone();
    at::Tensor expected = sources[0].clone();
    for (const Mode mode : {Mode::kStore, Mode::kAdd, Mode::kSkip}) {
        table.set(0, {mode, mode == Mode::kSkip ? nullptr : memory[0]});
        table.upload();
        replay(table);
        if (mode == Mode::kAdd) expected += sources[0];
        EXPECT_TRUE(destinations[0].equal(expected));
    }
    EXPECT_TRUE(destinations[1].equal(untouched));
    EXPECT_EQ(table.uploads(), 3);
}

}  // namespace
}  // namespace te_graph::graphs
