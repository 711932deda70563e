// What one forward of a callable occupies until its backward: a graph pair and its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "common/host_steps.h"
#include "graphs/callables/gradient_plan.h"
#include "graphs/callables/gradient_table.h"
#include "graphs/callables/lent_storages.h"
#include "graphs/callables/staging.h"
#include "graphs/capture/graph.h"
#include "graphs/guards/tensor_facts.h"

namespace te_graph::graphs {

// What a backward does with the gradient of one parameter.
struct ParameterUpdate {
    GradientAction action = GradientAction::kNothing;
    at::Tensor fresh;  // kStoreNew: what becomes .grad
    at::Tensor kept;   // of a main_grad that the graph writes where it must not change: what was there
};

// What the last backward added to, if it did nothing else: with the same again there is nothing to decide.
struct LastUpdate {
    bool is_possible = false, is_repeated = false;
    std::vector<std::pair<c10::TensorImpl*, TensorFacts>> destinations;  // [parameters], borrowed while it is repeated
};

// Backward graphs that were launched one after the other, as one.
struct MergedBackward {
    std::vector<std::weak_ptr<Graph>> parts;
    std::shared_ptr<Graph> graph;  // null until they have come together twice, or when they cannot be merged
    int seen = 0;
    bool repeats_a_step = false;  // of the host, so that they are not merged
};

// A graph pair and the memory that belongs to it.
struct Slot {
    std::shared_ptr<CapturedGraph> forward;
    std::shared_ptr<CapturedGraph> backward;  // null when nothing requires a gradient
    std::vector<at::Tensor>
        inputs;  // static copies of the arguments' tensors; linked ones lie in the predecessor's slot
    StaticTensors outputs;
    std::vector<std::shared_ptr<Staging>> grad_outputs;  // [differentiable outputs]
    StaticTensors grad_inputs;                           // [inputs], undefined where there is none
    std::vector<std::vector<at::Tensor>> use_grads;      // [inputs][uses], empty where there are fewer than two
    // [parameters], memory owned by the graph; where the op adds up by itself the memory that .grad has, that of all
    // slots.
    std::vector<at::Tensor> parameter_grads;
    // Inputs with two uses, whose gradients the table adds up in that of one use; -1 where the graph itself has added
    // them. Their entries follow the parameters'.
    std::vector<int> summed_inputs;
    std::shared_ptr<GradientTable> table;
    std::shared_ptr<LentStorages> lent_outputs{};  // by a chain's slots of this number
    std::vector<ParameterUpdate> updates{};        // [parameters], of the last backward
    LastUpdate last_update{};
    MergedBackward merged{};  // with those of the predecessors
    HostSteps host_steps{};   // before replays
};

}  // namespace te_graph::graphs
