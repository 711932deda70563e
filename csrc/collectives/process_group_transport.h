// Collectives over a process group of torch.distributed: gloo on CPUs, NCCL where GPUs are not on one host or by
// choice. The process group moves bytes; reductions are te_graph's own, so results have the bits of the kernels.
#pragma once

#include <memory>
#include <string>

#include "collectives/operation.h"

namespace te_graph::collectives {

// process_group: its name, as torch.distributed knows it.
std::unique_ptr<Transport> make_process_group_transport(const std::string& group, const std::string& process_group,
                                                        int rank, int world, at::Device device, double timeout);

}  // namespace te_graph::collectives
