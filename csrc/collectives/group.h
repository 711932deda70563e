// Groups of ranks, by name: ops find theirs when they run, so a trace or a graph holds a name and no object.
#pragma once

#include <memory>
#include <string>

#include "collectives/transport.h"

namespace te_graph::collectives {

class Group {
public:
    Group(std::string name, int rank, int world, at::Device device, std::shared_ptr<Transport> transport)
        : name_(std::move(name)), rank_(rank), world_(world), device_(device), transport_(std::move(transport)) {}

    const std::string& name() const { return name_; }
    int rank() const { return rank_; }
    int world() const { return world_; }
    at::Device device() const { return device_; }
    Transport& transport() const { return *transport_; }

    void run(const Operation& operation) const { transport_->run(operation); }
    void check(const char* op) const { transport_->check(op); }

private:
    std::string name_;
    int rank_, world_;
    at::Device device_;
    std::shared_ptr<Transport> transport_;
};

// Throws if there is a group of that name.
void add_group(std::shared_ptr<const Group> group);
void remove_group(const std::string& name);
// Throws if there is none.
std::shared_ptr<const Group> find_group(const char* op, const std::string& name);

}  // namespace te_graph::collectives
