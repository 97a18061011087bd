// The MPI library in this process: started on first use, ended at exit.
#pragma once

#include <mpi.h>

#include <chrono>
#include <string>
#include <vector>

namespace torch_mpi {

class Runtime {
 public:
  // Collective over all ranks of the job on first use, as MPI_Init is. Initialises MPI (or adopts
  // it where mpi4py has done so already) with MPI_THREAD_MULTIPLE. Throws DistBackendError when MPI was finalised or grants fewer threads.
  static Runtime& instance();
  static bool started();
  static bool finalized();

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  // A duplicate of MPI_COMM_WORLD for the bootstrap and the farewell; no tensor travels here.
  MPI_Comm control() const {
    return control_;
  }
  MPI_Group world_group() const {
    return world_group_;
  }
  int max_tag() const {
    return max_tag_;
  }
  // Whether these ranks of MPI_COMM_WORLD share one machine's memory.
  bool on_one_node(const std::vector<int>& ranks) const;
  // More ranks than CPUs on this machine.
  bool crowded() const;
  bool cuda_aware() const {
    return cuda_aware_;
  }
  // "Open MPI v5.0.11, … (/path/to/libmpi.so.40)"
  const std::string& library() const {
    return library_;
  }

  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

 private:
  Runtime();
  void find_nodes();

  bool owner_ = false;
  int rank_ = 0;
  int size_ = 1;
  int max_tag_ = 32767;
  bool cuda_aware_ = false;
  MPI_Comm control_ = MPI_COMM_NULL;
  MPI_Group world_group_ = MPI_GROUP_NULL;
  std::string library_;
  std::vector<int> node_of_; // for each rank the lowest rank of its node
};

// Prints why and ends every rank of the job with this exit status.
[[noreturn]] void abort_job(int status, const std::string& why);

// Set once a group has been given up (timeout, lost peer): the farewell then does not wait for ever.
void note_failure();

} // namespace torch_mpi
