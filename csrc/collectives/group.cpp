#include "collectives/group.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <vector>

#include "collectives/notice.h"

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

}  // namespace

void add_group(std::shared_ptr<const Group> group) {
    const std::lock_guard lock(registry().mutex);
    const std::string name = group->name();
    TORCH_CHECK_VALUE(registry().groups.emplace(name, std::move(group)).second, "PeerGroup: expected a new name, got '",
                      name, "', which a group has that is not closed");
}

void remove_group(const std::string& name) {
    std::shared_ptr<const Group> removed;  // outlives the lock
    const std::lock_guard lock(registry().mutex);
    if (const auto found = registry().groups.find(name); found != registry().groups.end()) {
        removed = std::move(found->second);
        registry().groups.erase(found);
    }
}

void check_all_groups(const char* who) {
    std::vector<std::shared_ptr<const Group>> groups;
    {
        const std::lock_guard lock(registry().mutex);
        for (const auto& [name, group] : registry().groups) groups.push_back(group);
    }
    is_some_group_given_up.store(false, std::memory_order_relaxed);
    for (const auto& group : groups) {
        try {
            group->check(who);
        } catch (...) {
            is_some_group_given_up.store(true, std::memory_order_relaxed);
            throw;
        }
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
