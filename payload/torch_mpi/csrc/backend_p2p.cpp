// send and receive.
#include "backend.hpp"

#include "errors.hpp"

namespace torch_mpi {

WorkPtr Backend::start_p2p(
    Operation op, at::Tensor tensor, Direction direction, int peer, int tag) {
  engine_->check_usable();
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided, "mpi ", op.name, ": sparse tensors are not supported");
  const int most = engine_->communicator()->max_user_tag();
  TORCH_CHECK_VALUE(
      tag >= 0 && tag <= most, "mpi ", op.name, ": tag ", tag, " is not within 0 … ", most);
  reap_orphans();
  op.number = sequence_;
  return remember(c10::make_intrusive<P2PWork>(
      engine_, op, std::move(tensor), direction, peer, tag));
}

namespace {

at::Tensor only(const Tensors& tensors, const char* name) {
  TORCH_CHECK_VALUE(
      tensors.size() == 1, "mpi ", name, ": one tensor at a time, got ", tensors.size());
  return tensors[0];
}

} // namespace

WorkPtr Backend::send(Tensors& tensors, int dst, int tag) {
  check_root(dst, "send");
  return start_p2p(
      operation(c10d::OpType::SEND, "send", "mpi:send", c10d::kUnsetTimeout),
      only(tensors, "send"), Direction::Send, dst, tag);
}

WorkPtr Backend::recv(Tensors& tensors, int src, int tag) {
  check_root(src, "recv");
  return start_p2p(
      operation(c10d::OpType::RECV, "recv", "mpi:recv", c10d::kUnsetTimeout),
      only(tensors, "recv"), Direction::Receive, src, tag);
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return start_p2p(
      operation(c10d::OpType::RECVANYSOURCE, "recvAnySource", "mpi:recvAnySource", c10d::kUnsetTimeout),
      only(tensors, "recv"), Direction::Receive, MPI_ANY_SOURCE, tag);
}

} // namespace torch_mpi
