// The transport of a group of one rank: no data is moved, and it can be aborted like any other.
#pragma once

#include <memory>
#include <string>

#include "collectives/operation.h"

namespace te_graph::collectives {

std::unique_ptr<Transport> make_local_transport(std::string group);

}  // namespace te_graph::collectives
