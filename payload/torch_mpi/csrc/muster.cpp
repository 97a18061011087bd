#include "muster.hpp"

#include "errors.hpp"

namespace torch_mpi {

Muster::Muster(MPI_Comm comm, const std::vector<int>& ranks, int me, int tag)
    : comm_(comm), ranks_(ranks), tag_(tag), answers_(me == ranks.front()) {
  const int first = ranks.front();
  requests_.resize(answers_ ? ranks.size() - 1 : 2, MPI_REQUEST_NULL);
  is_receive_.resize(requests_.size(), true);
  if (answers_) {
    for (size_t i = 0; i < requests_.size(); ++i) {
      mpi_check(
          MPI_Irecv(nullptr, 0, MPI_BYTE, ranks[i + 1], tag, comm, &requests_[i]), "MPI_Irecv");
    }
  } else {
    mpi_check(MPI_Irecv(nullptr, 0, MPI_BYTE, first, tag, comm, &requests_[0]), "MPI_Irecv");
    is_receive_[1] = false;
    mpi_check(MPI_Isend(nullptr, 0, MPI_BYTE, first, tag, comm, &requests_[1]), "MPI_Isend");
  }
}

Muster::~Muster() {
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] != MPI_REQUEST_NULL) {
      if (is_receive_[i]) {
        MPI_Cancel(&requests_[i]);
      }
      MPI_Request_free(&requests_[i]);
    }
  }
}

bool Muster::complete() {
  int done = 0;
  const auto test = [&] {
    mpi_check(
        MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
  };
  test();
  if (done && answers_) {
    answer();
    test();
  }
  return done != 0;
}

void Muster::answer() {
  answers_ = false;
  for (size_t i = 0; i < requests_.size(); ++i) {
    is_receive_[i] = false;
    mpi_check(
        MPI_Isend(nullptr, 0, MPI_BYTE, ranks_[i + 1], tag_, comm_, &requests_[i]), "MPI_Isend");
  }
}

} // namespace torch_mpi
