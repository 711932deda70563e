#include "collectives/group.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <vector>

#include "common/abort_flag.h"

namespace te_graph::collectives {
namespace {

struct Registry {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<const Group>> groups;
};

// Never destroyed: at exit CUDA may be gone before the groups are.
Registry& registry() {
    static auto* const instance = new Registry;
    return *instance;
}

void check_open_groups(const char* caller) {
    std::vector<std::shared_ptr<const Group>> groups;
    {
        const std::lock_guard lock(registry().mutex);
        for (const auto& [name, group] : registry().groups) groups.push_back(group);
    }
    any_group_aborted.store(false, std::memory_order_relaxed);
    for (const auto& group : groups) {
        try {
            group->check(caller);
        } catch (...) {
            any_group_aborted.store(true, std::memory_order_relaxed);
            throw;
        }
    }
}

// The library is loaded before any group can be made.
const bool registered = [] {
    check_all_groups = &check_open_groups;
    return true;
}();

}  // namespace

void add_group(std::shared_ptr<const Group> group) {
    const std::lock_guard lock(registry().mutex);
    const std::string name = group->name();
    TORCH_CHECK_VALUE(registry().groups.emplace(name, std::move(group)).second, "PeerGroup: expected a new name, got '",
                      name, "', which an open group has");
}

void remove_group(const std::string& name) {
    std::shared_ptr<const Group> removed;  // outlives the lock
    const std::lock_guard lock(registry().mutex);
    if (const auto found = registry().groups.find(name); found != registry().groups.end()) {
        removed = std::move(found->second);
        registry().groups.erase(found);
    }
}

std::shared_ptr<const Group> find_group(const char* op, const std::string& name) {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().groups.find(name);
    TORCH_CHECK_VALUE(found != registry().groups.end(), op, ": expected the name of a te_graph.PeerGroup, got '", name,
                      "'");
    return found->second;
}

}  // namespace te_graph::collectives
