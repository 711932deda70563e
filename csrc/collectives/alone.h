// A group of one rank: nothing has to move, and it can be given up like any other.
#pragma once

#include <memory>
#include <string>

#include "collectives/operation.h"

namespace te_graph::collectives {

std::unique_ptr<Transport> make_transport_alone(std::string group);

}  // namespace te_graph::collectives
