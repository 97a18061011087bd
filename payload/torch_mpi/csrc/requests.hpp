// A bundle of point-to-point requests that is complete, or cleaned up, when it goes out of scope.
#pragma once

#include "errors.hpp"
#include "waiting.hpp"

#include <mpi.h>

#include <algorithm>
#include <vector>

namespace torch_mpi {

class Requests {
 public:
  explicit Requests(Waiter& waiter) : waiter_(waiter) {}
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  // After an exception receives are cancelled, so that a late message cannot write into memory
  // that is somebody else's by then. Sends cannot be: their buffers are kept by whoever caught it.
  ~Requests() {
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] != MPI_REQUEST_NULL && is_receive_[i]) {
        MPI_Cancel(&requests_[i]);
        MPI_Request_free(&requests_[i]);
      }
    }
  }

  void send(const void* data, int64_t bytes, int peer, int tag) {
    pieces(bytes, [&](int64_t offset, int length) {
      mpi_check(
          MPI_Isend(
              static_cast<const char*>(data) + offset, length, MPI_BYTE, peer, tag,
              waiter_.comm.get(), add(false)),
          "MPI_Isend");
    });
  }

  void receive(void* data, int64_t bytes, int peer, int tag) {
    pieces(bytes, [&](int64_t offset, int length) {
      mpi_check(
          MPI_Irecv(
              static_cast<char*>(data) + offset, length, MPI_BYTE, peer, tag, waiter_.comm.get(),
              add(true)),
          "MPI_Irecv");
    });
  }

  size_t size() const {
    return requests_.size();
  }

  void wait() {
    waiter_.wait_all(requests_.data(), static_cast<int>(requests_.size()));
    requests_.clear();
    is_receive_.clear();
  }

  static constexpr int64_t kPiece = int64_t(1) << 30;

 private:
  template <typename F>
  static void pieces(int64_t bytes, F&& f) {
    for (int64_t offset = 0; offset < bytes; offset += kPiece) {
      f(offset, static_cast<int>(std::min(kPiece, bytes - offset)));
    }
  }

  MPI_Request* add(bool receive) {
    requests_.push_back(MPI_REQUEST_NULL);
    is_receive_.push_back(receive);
    return &requests_.back();
  }

  Waiter& waiter_;
  std::vector<MPI_Request> requests_;
  std::vector<char> is_receive_;
};

} // namespace torch_mpi
