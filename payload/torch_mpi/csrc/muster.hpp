// Have all members of a group come that is about to be made?
//
// MPI_Comm_create_group cannot be given up once it was called: a member that never comes would leave
// the others' threads inside of it, and MPI cannot be shut down around them. So the members first
// send empty messages, which can be given up: all to the group's first rank, and its answer to all.
#pragma once

#include <mpi.h>

#include <vector>

namespace torch_mpi {

class Muster {
 public:
  // `ranks` are ranks of `comm`, this process (`me`) among them; `tag` is the same on all members.
  Muster(MPI_Comm comm, const std::vector<int>& ranks, int me, int tag);
  ~Muster();
  Muster(const Muster&) = delete;
  Muster& operator=(const Muster&) = delete;

  // Looks, without waiting; true once all members have come and know it.
  bool complete();

 private:
  void answer();

  MPI_Comm comm_;
  const std::vector<int>& ranks_;
  int tag_;
  bool answers_; // the first rank, until it has answered
  std::vector<MPI_Request> requests_;
  std::vector<char> is_receive_;
};

} // namespace torch_mpi
