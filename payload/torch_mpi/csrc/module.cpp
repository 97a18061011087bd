// What Python sees of all this: torch_mpi._C.
#include "algorithms.hpp"
#include "backend.hpp"
#include "errors.hpp"
#include "runtime.hpp"

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <pybind11/chrono.h>

#include <mutex>
#include <unordered_set>

namespace py = pybind11;
using namespace torch_mpi;

namespace {

// Live groups, for the end of the process. Not owners: torch's ProcessGroup is.
class Groups {
 public:
  static Groups& instance() {
    static auto* groups = new Groups();
    return *groups;
  }
  void add(const c10::intrusive_ptr<Backend>& backend) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.push_back(c10::weak_intrusive_ptr<Backend>(backend));
  }
  void leave_all() {
    std::vector<c10::weak_intrusive_ptr<Backend>> groups;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      groups.swap(groups_);
    }
    for (auto& weak : groups) {
      if (auto backend = weak.lock()) {
        backend->leave();
      }
    }
  }

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<Backend>> groups_;
};

c10::intrusive_ptr<Backend> create_backend(
    const std::vector<int>& ranks,
    std::optional<c10::intrusive_ptr<c10d::Store>> store,
    std::chrono::milliseconds timeout,
    const std::string& name) {
  auto backend = Backend::create(ranks, store ? *store : nullptr, timeout, name);
  Groups::instance().add(backend);
  return backend;
}

// Rank 0's bytes on all ranks of the job.
std::string broadcast_bytes(std::string data) {
  auto& runtime = Runtime::instance();
  int length = static_cast<int>(data.size());
  mpi_check(MPI_Bcast(&length, 1, MPI_INT, 0, runtime.control()), "MPI_Bcast");
  data.resize(length);
  mpi_check(MPI_Bcast(data.data(), length, MPI_BYTE, 0, runtime.control()), "MPI_Bcast");
  return data;
}

} // namespace

PYBIND11_MODULE(_C, m) {
  py::module_::import("torch._C._distributed_c10d"); // our base classes
  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(m, "Options")
      .def("__copy__", [](const GroupOptions& self) {
        return c10::make_intrusive<GroupOptions>(self);
      })
      .def("__deepcopy__", [](const GroupOptions& self, const py::dict&) {
        return c10::make_intrusive<GroupOptions>(self);
      });
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "ProcessGroupMPI")
      .def_property_readonly("options", [](Backend& self) {
        return c10::static_intrusive_pointer_cast<GroupOptions>(self.getBackendOptions());
      });
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("start", [] { Runtime::instance(); }, no_gil, "Start MPI (collective, once a process).");
  m.def("started", &Runtime::started);
  m.def("world_rank", [] { return Runtime::instance().rank(); });
  m.def("world_size", [] { return Runtime::instance().size(); });
  m.def("library", [] { return Runtime::instance().library(); });
  m.def("cuda_aware", [] { return Runtime::instance().cuda_aware(); });
  m.def("live_communicators", &Communicator::live);
  m.def("abort", [](int status, const std::string& why) { abort_job(status, why); }, no_gil);
  m.def("leave_all_groups", [] { Groups::instance().leave_all(); }, no_gil);
  m.def(
      "broadcast_bytes",
      [](const py::bytes& data) {
        std::string text = data;
        {
          py::gil_scoped_release release;
          text = broadcast_bytes(std::move(text));
        }
        return py::bytes(text);
      });
  m.def(
      "create_backend", &create_backend, no_gil, py::arg("ranks"), py::arg("store"),
      py::arg("timeout"), py::arg("name"));
  m.attr("CHUNK_BYTES") = kChunkBytes;
  m.attr("SMALL_BYTES") = kSmallBytes;
}
