// StaticTensors and LentStorages: no value changes under its holder, and nothing without a holder is copied.
#include "graphs/callables/lent_storages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>
#include <gtest/gtest.h>

#include <memory>

namespace te_graph::graphs {
namespace {

// What a replay does to static memory.
void overwrite(const at::Tensor& memory) {
    const at::NoGradGuard no_grad;
    memory.detach().fill_(-1);
}

// Counts allocations of CPU memory for as long as it lives.
class AllocationCount final : public c10::Allocator {
public:
    AllocationCount() : real_(*c10::GetAllocator(at::kCPU)) { c10::SetAllocator(at::kCPU, this, kPriority); }
    ~AllocationCount() override { c10::SetAllocator(at::kCPU, &real_, kPriority); }
    AllocationCount(const AllocationCount&) = delete;
    AllocationCount& operator=(const AllocationCount&) = delete;

    at::DataPtr allocate(size_t bytes) override {
        ++count_;
        return real_.allocate(bytes);
    }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { real_.copy_data(to, from, bytes); }
    int count() const { return count_; }

private:
    static constexpr uint8_t kPriority = 255;
    c10::Allocator& real_;
    int count_ = 0;
};

class LentStoragesTest : public testing::Test {
protected:
    // Lends tensors over `memory` alone.
    at::Tensor lend(const at::Tensor& memory) { return StaticTensors({memory}).lend(lent_storages).front(); }

    const at::Tensor memory = at::rand({3, 4});
    const at::Tensor before = memory.clone();
    LentStorages lent_storages;
};

TEST_F(LentStoragesTest, GivesATensorOverTheSameMemoryWithAStorageOfItsOwn) {
    const at::Tensor memory = at::rand({5, 6}).t().slice(0, 1, 5, 2);
    const at::Tensor lent = lend(memory);
    EXPECT_EQ(lent.const_data_ptr(), memory.const_data_ptr());
    EXPECT_EQ(lent.sizes(), memory.sizes());
    EXPECT_EQ(lent.strides(), memory.strides());
    EXPECT_EQ(lent.storage_offset(), memory.storage_offset());
    EXPECT_EQ(lent.storage().nbytes(), memory.storage().nbytes());
    EXPECT_NE(lent.storage().unsafeGetStorageImpl(), memory.storage().unsafeGetStorageImpl());
}

TEST_F(LentStoragesTest, AHeldTensorKeepsItsValueWhenTheMemoryIsOverwritten) {
    const at::Tensor lent = lend(memory);
    lent_storages.protect();
    overwrite(memory);
    EXPECT_TRUE(lent.equal(before));
    EXPECT_NE(lent.const_data_ptr(), memory.const_data_ptr());
}

TEST_F(LentStoragesTest, WithoutProtectAHeldTensorSeesTheOverwrite) {
    const at::Tensor lent = lend(memory);
    overwrite(memory);
    EXPECT_TRUE(lent.equal(memory));
}

TEST_F(LentStoragesTest, OffsetAndStridesHoldInTheCopyToo) {
    const at::Tensor memory = at::rand({5, 6}).t().slice(0, 1, 5, 2);
    const at::Tensor before = memory.clone();
    const at::Tensor lent = lend(memory);
    lent_storages.protect();
    overwrite(memory);
    EXPECT_TRUE(lent.equal(before));
    EXPECT_EQ(lent.strides(), memory.strides());
    EXPECT_EQ(lent.storage_offset(), memory.storage_offset());
}

TEST_F(LentStoragesTest, AViewFollowsThoughItsBaseIsGone) {
    at::Tensor lent = lend(memory);
    const at::Tensor view = lent.select(0, 1);
    lent.reset();
    lent_storages.protect();
    overwrite(memory);
    EXPECT_TRUE(view.equal(before.select(0, 1)));
}

TEST_F(LentStoragesTest, ASecondTensorOverTheStorageFollowsAndStaysAnAlias) {
    const at::Tensor lent = lend(memory);
    const at::Tensor second = lent.detach();
    lent_storages.protect();
    overwrite(memory);
    EXPECT_TRUE(second.equal(before));
    EXPECT_EQ(second.const_data_ptr(), lent.const_data_ptr());
    lent.zero_();
    EXPECT_TRUE(second.equal(at::zeros({3, 4})));
}

TEST_F(LentStoragesTest, ATensorThatOnlyAutogradSavedKeepsItsValue) {
    const at::Tensor weight = at::rand({3, 4}).requires_grad_();
    const at::Tensor loss = weight.mul(lend(memory)).sum();
    lent_storages.protect();
    overwrite(memory);
    loss.backward();
    EXPECT_TRUE(weight.grad().equal(before));
}

TEST_F(LentStoragesTest, NothingIsCopiedWhenNobodyHoldsTheTensor) {
    const int64_t owners = memory.storage().use_count();
    at::Tensor lent = lend(memory);
    lent.reset();
    const AllocationCount allocations;
    lent_storages.protect();
    EXPECT_EQ(allocations.count(), 0);
    EXPECT_EQ(memory.storage().use_count(), owners);
    EXPECT_EQ(lend(memory).const_data_ptr(), memory.const_data_ptr());
}

TEST_F(LentStoragesTest, AHeldStorageIsCopiedOnceHoweverOftenItIsProtected) {
    const at::Tensor lent = lend(memory);
    const AllocationCount allocations;
    lent_storages.protect();
    const void* const moved_to = lent.const_data_ptr();
    lent_storages.protect();
    EXPECT_EQ(allocations.count(), 1);
    EXPECT_EQ(lent.const_data_ptr(), moved_to);
}

TEST_F(LentStoragesTest, TensorsOfSeveralReplaysKeepTheValuesOfTheirs) {
    std::vector<at::Tensor> lent, expected;
    for (int replay = 0; replay < 3; ++replay) {
        lent_storages.protect();
        memory.copy_(at::rand({3, 4}));
        expected.push_back(memory.clone());
        lent.push_back(lend(memory));
    }
    for (int replay = 0; replay < 3; ++replay) EXPECT_TRUE(lent[replay].equal(expected[replay])) << replay;
    EXPECT_EQ(lent[2].const_data_ptr(), memory.const_data_ptr());
}

TEST_F(LentStoragesTest, OnlyTheHeldOnesOfSeveralStoragesAreCopied) {
    const at::Tensor other = at::rand({2});
    auto lent = StaticTensors({memory, other}).lend(lent_storages);
    lent[0].reset();
    const AllocationCount allocations;
    lent_storages.protect();
    EXPECT_EQ(allocations.count(), 1);
    EXPECT_NE(lent[1].const_data_ptr(), other.const_data_ptr());
}

TEST_F(LentStoragesTest, TensorsOverOneStorageShareMemoryVersionAndCopy) {
    const at::Tensor other = at::rand({2});
    const auto lent = StaticTensors({memory, other, memory.select(0, 2)}).lend(lent_storages);
    EXPECT_EQ(lent[0].storage().unsafeGetStorageImpl(), lent[2].storage().unsafeGetStorageImpl());
    EXPECT_NE(lent[0].storage().unsafeGetStorageImpl(), lent[1].storage().unsafeGetStorageImpl());

    lent[2].mul_(2);
    EXPECT_EQ(lent[0]._version(), 1u);
    EXPECT_EQ(lent[2]._version(), 1u);
    EXPECT_EQ(lent[1]._version(), 0u);

    const at::Tensor doubled = memory.clone();
    const AllocationCount allocations;
    lent_storages.protect();
    EXPECT_EQ(allocations.count(), 2);  // one for each storage
    overwrite(memory);
    EXPECT_TRUE(lent[0].equal(doubled));
    EXPECT_TRUE(lent[2].equal(doubled.select(0, 2)));
}

TEST_F(LentStoragesTest, UndefinedTensorsStayUndefined) {
    const auto lent = StaticTensors({at::Tensor(), memory, at::Tensor()}).lend(lent_storages);
    EXPECT_FALSE(lent[0].defined());
    EXPECT_TRUE(lent[1].equal(memory));
    EXPECT_FALSE(lent[2].defined());
}

TEST_F(LentStoragesTest, EmptyTensorsAreLentAndProtected) {
    const at::Tensor lent = lend(at::zeros({0, 4}));
    lent_storages.protect();
    EXPECT_EQ(lent.sizes(), (at::IntArrayRef{0, 4}));
}

TEST_F(LentStoragesTest, WhatIsLentHasNoHistoryAndAVersionOfItsOwn) {
    const at::Tensor memory = at::rand({3}).requires_grad_();
    overwrite(memory);
    const auto version = memory._version();
    const at::Tensor lent = lend(memory);
    EXPECT_FALSE(lent.requires_grad());
    EXPECT_EQ(lent._version(), 0u);
    lent.add_(1);
    EXPECT_EQ(lent._version(), 1u);
    EXPECT_EQ(memory._version(), version);
    EXPECT_EQ(lend(memory)._version(), 0u);
}

TEST_F(LentStoragesTest, TheMemoryOutlivesTheStaticTensorWhileItIsLent) {
    auto statics = std::make_unique<StaticTensors>(std::vector<at::Tensor>{at::rand({100})});
    const c10::weak_intrusive_ptr<c10::StorageImpl> watch(statics->tensors()[0].storage().getWeakStorageImpl());
    const at::Tensor expected = statics->tensors()[0].clone();
    at::Tensor lent = statics->lend(lent_storages)[0];
    statics.reset();
    EXPECT_FALSE(watch.expired());
    EXPECT_TRUE(lent.equal(expected));
    lent.reset();
    lent_storages.protect();
    EXPECT_TRUE(watch.expired());
}

TEST_F(LentStoragesTest, AMovedTensorLetsGoOfTheStaticMemory) {
    const int64_t owners = memory.storage().use_count();
    const at::Tensor lent = lend(memory);
    EXPECT_EQ(memory.storage().use_count(), owners + 1);
    lent_storages.protect();
    EXPECT_EQ(memory.storage().use_count(), owners);
}

}  // namespace
}  // namespace te_graph::graphs
