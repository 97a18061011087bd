// An MPI communicator that belongs to one process group, with the buffers its algorithms need.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace torch_mpi {

// Scratch memory that stays with its communicator: allocating 4 MiB anew for each call costs more
// page faults than the reduction costs time.
class Scratch {
 public:
  char* at_least(size_t bytes);

 private:
  struct Free {
    void operator()(char* p) const {
      std::free(p);
    }
  };
  std::unique_ptr<char, Free> memory_;
  size_t capacity_ = 0;
};

// The tag by which the members of a group that is being made find each other.
int creation_tag(const std::string& name);

class Communicator {
 public:
  // Made by the members alone (MPI_Comm_create_group): non-members never hear of it. `ranks` are
  // ranks of MPI_COMM_WORLD in group order; `name` must be the same on all members and gives the
  // tag that keeps groups apart which are made at the same time.
  static std::shared_ptr<Communicator> create(
      const std::vector<int>& ranks, const std::string& name);

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  MPI_Comm get() const {
    return comm_;
  }
  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  // All members share one machine's memory.
  bool single_node() const {
    return single_node_;
  }
  // Tags above this one are our own.
  int max_user_tag() const;
  int internal_tag(int which) const;

  // A communicator with requests that were given up must never be freed.
  void condemn() {
    condemned_ = true;
  }

  // Frees it now; the object stays valid for messages. Every member must do so.
  void release();

  static int live();

  Scratch scratch[3];

 private:
  Communicator(MPI_Comm comm, bool single_node);

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  bool single_node_;
  bool condemned_ = false;
};

} // namespace torch_mpi
