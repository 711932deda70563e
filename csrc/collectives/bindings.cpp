#include "collectives/bindings.h"

#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "collectives/group.h"
#include "collectives/peer_transport.h"
#include "collectives/symmetric_buffer.h"

namespace py = pybind11;

namespace te_graph::collectives {
namespace {

// Python's handle of a group, which ops find by its name until the handle is closed. Another thread than those that
// use it may close it.
class Handle {
public:
    Handle(std::string name, int rank, int world, at::Device device, std::shared_ptr<Transport> transport)
        : group_(std::make_shared<Group>(Group{std::move(name), rank, world, device, std::move(transport)})) {
        add_group(group_);
    }

    void close() {
        std::shared_ptr<const Group> closed;  // outlives the lock
        {
            const std::lock_guard lock(mutex_);
            closed = std::move(group_);
        }
        if (closed) remove_group(closed->name);
    }
    std::shared_ptr<const Group> group() const {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK(group_, "PeerGroup: expected a group that is open, got one that was closed");
        return group_;
    }
    template <typename Function>
    void with_transport(const Function& function) const {
        const auto group = this->group();
        function(*group->transport);
    }

private:
    mutable std::mutex mutex_;
    std::shared_ptr<const Group> group_;
};

std::unique_ptr<Handle> make_local(std::string name, at::Device device) {
    auto transport = make_local_transport(name);
    return std::make_unique<Handle>(std::move(name), 0, 1, device, std::move(transport));
}

std::unique_ptr<Handle> make_on_process_group(std::string name, const std::string& process_group, int rank, int world,
                                              at::Device device, double timeout) {
    auto transport = make_process_group_transport(name, process_group, rank, world, device, timeout);
    return std::make_unique<Handle>(std::move(name), rank, world, device, std::move(transport));
}

#ifdef TE_GRAPH_CUDA
// function(transport) of a group of peers.
template <typename Function>
auto with_peers(const Handle& handle, const Function& function) {
    const auto group = handle.group();
    auto* const transport = dynamic_cast<PeerTransport*>(group->transport.get());
    TORCH_CHECK(transport != nullptr, "PeerGroup: expected a group of GPUs that are peers, got one without");
    return function(*transport);
}

std::unique_ptr<Handle> make_on_peers(std::string name, const SymmetricBuffer& buffer, int64_t receive_buffer_bytes,
                                      int rank, double timeout, bool traps, double watchdog) {
    const auto world = static_cast<int>(buffer.addresses().size());
    const at::Device device = buffer.memory().device();
    auto transport = std::make_shared<PeerTransport>(
        name, PeerMemory{buffer.memory(), buffer.addresses(), receive_buffer_bytes, rank},
        PeerOptions{timeout, traps, watchdog, default_tuning(world)});
    return std::make_unique<Handle>(std::move(name), rank, world, device, std::move(transport));
}
#endif

}  // namespace

void bind(py::module_& m) {
    m.def("set_in_backward", &set_in_backward, py::arg("captured"));
    const py::call_guard<py::gil_scoped_release> without_gil;
    py::class_<Handle> handle(m, "GroupHandle");
    handle.def_static("local", &make_local, py::arg("name"), py::arg("device"))
        .def_static("on_process_group", &make_on_process_group, py::arg("name"), py::arg("process_group"),
                    py::arg("rank"), py::arg("world"), py::arg("device"), py::arg("timeout"), without_gil)
        .def("close", &Handle::close, without_gil)
        .def(
            "check",
            [](const Handle& self, const std::string& op) {
                self.with_transport([&](Transport& it) { it.check(op.c_str()); });
            },
            py::arg("op"), without_gil)
        .def(
            "abort", [](const Handle& self) { self.with_transport([](Transport& it) { it.abort(); }); }, without_gil)
        .def(
            "set_timeout",
            [](const Handle& self, double seconds) {
                self.with_transport([&](Transport& it) { it.set_timeout(seconds); });
            },
            py::arg("seconds"), without_gil);
#ifdef TE_GRAPH_CUDA
    m.def("has_peer_link", &has_peer_link, py::arg("device"), py::arg("peer"));
    py::class_<SymmetricBuffer>(m, "SymmetricBuffer")
        .def(py::init<at::Device, int64_t>(), py::arg("device"), py::arg("bytes"), without_gil)
        .def("memory", &SymmetricBuffer::memory)
        .def("handle", [](const SymmetricBuffer& self) { return py::bytes(self.handle()); })
        .def("map", &SymmetricBuffer::map, py::arg("handles"), py::arg("rank"), without_gil)
        .def("unmap", &SymmetricBuffer::unmap, without_gil)
        .def("memory_of", &SymmetricBuffer::memory_of, py::arg("rank"))
        .def("abandon", &SymmetricBuffer::abandon);
    m.def("make_pool_allocator", &make_pool_allocator, py::arg("group"), py::arg("buffer"), py::arg("begin"));
    handle
        .def_static("on_peers", &make_on_peers, py::arg("name"), py::arg("buffer"), py::arg("receive_buffer_bytes"),
                    py::arg("rank"), py::arg("timeout"), py::arg("traps"), py::arg("watchdog"), without_gil)
        .def("found_inf",
             [](const Handle& self) { return with_peers(self, [](PeerTransport& it) { return it.found_inf(); }); })
        .def("tuning",
             [](const Handle& self) {
                 const Tuning tuning = with_peers(self, [](PeerTransport& it) { return it.tuning(); });
                 return std::tuple{tuning.one_shot_bytes, tuning.ll128_bytes, tuning.gather_ll128_bytes, tuning.blocks};
             })
        .def(
            "set_tuning",
            [](const Handle& self, int64_t one_shot_bytes, int64_t ll128_bytes, int64_t gather_ll128_bytes,
               int blocks) {
                TORCH_CHECK_VALUE(blocks >= 1 && blocks <= kMaxBlocks && (blocks & (blocks - 1)) == 0,
                                  "set_tuning: expected blocks to be a power of two up to ", kMaxBlocks, ", got ",
                                  blocks);
                const Tuning tuning{one_shot_bytes, ll128_bytes, gather_ll128_bytes, blocks};
                with_peers(self, [&](PeerTransport& it) { it.set_tuning(tuning); });
            },
            py::arg("one_shot_bytes"), py::arg("ll128_bytes"), py::arg("gather_ll128_bytes"), py::arg("blocks"));
#endif
}

}  // namespace te_graph::collectives
