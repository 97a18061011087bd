// The collectives on tensors that only move data.
#include "arguments.hpp"
#include "backend.hpp"
#include "errors.hpp"

namespace torch_mpi {

namespace {

void check_same_kind(const at::Tensor& a, const at::Tensor& b, const char* name) {
  TORCH_CHECK_VALUE(
      a.layout() == at::kStrided && b.layout() == at::kStrided, "mpi ", name,
      ": sparse tensors are not supported; densify with .to_dense()");
  TORCH_CHECK_VALUE(
      a.scalar_type() == b.scalar_type() && a.device() == b.device(), "mpi ", name,
      ": tensors must have one dtype and device, got ", a.scalar_type(), " on ", a.device(),
      " and ", b.scalar_type(), " on ", b.device());
}

void check_list(
    const TensorLists& lists, const at::Tensor& like, int n, const char* name) {
  TORCH_CHECK_VALUE(
      lists.size() == 1 && static_cast<int>(lists[0].size()) == n, "mpi ", name,
      ": wanted one list of ", n, " tensors (the group's size), got ", lists.size(),
      " lists", lists.empty() ? std::string() : c10::str(", the first of ", lists[0].size()));
  for (const auto& t : lists[0]) {
    check_same_kind(t, like, name);
  }
}

void allgather_list(
    Waiter& w, const at::Tensor& input, const Tensors& outputs, Session& session) {
  const bool stage = must_stage(input);
  Dense in(input, stage);
  auto list = dense_list(outputs, stage);
  char* data = in.load();
  const auto memory = blocks_of(list, Content::Space);
  session.inputs_loaded();
  torch_mpi::allgather(w, data, in.bytes(), memory, memory_kind(input, stage));
  store_all(list);
}

void allgather_flat(
    Waiter& w, const at::Tensor& input, const at::Tensor& output, Session& session) {
  const bool stage = must_stage(input);
  Dense in(input, stage);
  Dense out(output, stage);
  char* data = in.load();
  char* result = out.space();
  session.inputs_loaded();
  if (in.bytes() > 0) {
    allgather_even(w, data, in.bytes(), result, memory_kind(input, stage));
  }
  out.store();
}

void check_flat(const at::Tensor& output, const at::Tensor& input, int n, const char* name) {
  check_same_kind(output, input, name);
  TORCH_CHECK_VALUE(
      output.numel() == input.numel() * n, "mpi ", name, ": output of ", output.numel(),
      " elements, wanted input's ", input.numel(), " times the group's size ", n);
}

} // namespace

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto& t = only(tensors, "broadcast");
  check_same_kind(t, t, "broadcast");
  check_root(opts.rootRank, "broadcast");
  const int root = static_cast<int>(opts.rootRank);
  auto streams = DeviceStreams::of(t);
  return submit(
      operation(c10d::OpType::BROADCAST, "broadcast", "mpi:broadcast", opts.timeout),
      opts.asyncOp, static_cast<int64_t>(t.nbytes()), tensors, tensors, streams,
      [&] { return c10::str("root ", root, ", ", describe_tensor(t)); },
      [t, root, streams](Waiter& w) {
        Session session(streams.get());
        Dense dense(t, must_stage(t));
        const bool is_root = w.comm.rank() == root;
        char* data = is_root ? dense.load() : dense.space();
        session.inputs_loaded();
        if (dense.bytes() > 0 && w.comm.size() > 1) {
          torch_mpi::broadcast(w, data, dense.bytes(), root);
        }
        if (!is_root) {
          dense.store();
        }
        session.outputs_stored();
      });
}

WorkPtr Backend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const auto& input = only(inputs, "allgather");
  check_list(outputs, input, getSize(), "allgather");
  const auto& mine = outputs[0][getRank()];
  TORCH_CHECK_VALUE(
      mine.numel() == input.numel(), "mpi allgather: input of shape ", input.sizes(),
      ", but this rank's place in the output list has shape ", mine.sizes());
  auto streams = DeviceStreams::of(input);
  return submit(
      operation(c10d::OpType::ALLGATHER, "allgather", "mpi:all_gather", opts.timeout),
      opts.asyncOp, total_bytes(outputs[0]), inputs, outputs[0], streams,
      [&] { return describe_tensors(outputs[0]); },
      [input, list = outputs[0], streams](Waiter& w) {
        Session session(streams.get());
        allgather_list(w, input, list, session);
        session.outputs_stored();
      });
}

WorkPtr Backend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  check_flat(output, input, getSize(), "all_gather_into_tensor");
  auto streams = DeviceStreams::of(input);
  return submit(
      operation(
          c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", "mpi:_all_gather_base",
          opts.timeout),
      opts.asyncOp, static_cast<int64_t>(output.nbytes()), {input}, {output}, streams,
      [&] { return describe_tensor(input); },
      [input = input, output = output, streams](Waiter& w) {
        Session session(streams.get());
        allgather_flat(w, input, output, session);
        session.outputs_stored();
      });
}

WorkPtr Backend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), "mpi allgather_coalesced: no tensors");
  TORCH_CHECK_VALUE(
      static_cast<int>(outputs.size()) == getSize(), "mpi allgather_coalesced: wanted ", getSize(),
      " output lists (one a rank), got ", outputs.size());
  Tensors flat;
  std::vector<Tensors> by_input(inputs.size());
  for (const auto& list : outputs) {
    TORCH_CHECK_VALUE(
        list.size() == inputs.size(), "mpi allgather_coalesced: an output list has ", list.size(),
        " tensors for ", inputs.size(), " inputs");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_same_kind(list[i], inputs[i], "allgather_coalesced");
      by_input[i].push_back(list[i]);
      flat.push_back(list[i]);
    }
  }
  auto streams = DeviceStreams::of(inputs[0]);
  return submit(
      operation(
          c10d::OpType::ALLGATHER_COALESCED, "allgather_coalesced", "mpi:all_gather",
          opts.timeout),
      opts.asyncOp, total_bytes(flat), inputs, flat, streams,
      [&] { return describe_tensors(flat); },
      [inputs, by_input, streams](Waiter& w) {
        Session session(streams.get());
        for (size_t i = 0; i < inputs.size(); ++i) {
          allgather_list(w, inputs[i], by_input[i], session);
        }
        session.outputs_stored();
      });
}

WorkPtr Backend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(
      !inputs.empty() && inputs.size() == outputs.size(),
      "mpi allgather_into_tensor_coalesced: ", outputs.size(), " outputs for ", inputs.size(),
      " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_flat(outputs[i], inputs[i], getSize(), "allgather_into_tensor_coalesced");
  }
  auto streams = DeviceStreams::of(inputs[0]);
  return submit(
      operation(
          c10d::OpType::COALESCED, "allgather_into_tensor_coalesced", "mpi:_all_gather_base",
          opts.timeout),
      opts.asyncOp, total_bytes(outputs), inputs, outputs, streams,
      [&] { return describe_tensors(inputs); },
      [inputs, outputs, streams](Waiter& w) {
        Session session(streams.get());
        for (size_t i = 0; i < inputs.size(); ++i) {
          allgather_flat(w, inputs[i], outputs[i], session);
        }
        session.outputs_stored();
      });
}

WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const auto& input = only(inputs, "gather");
  check_root(opts.rootRank, "gather");
  const int root = static_cast<int>(opts.rootRank);
  const bool is_root = getRank() == root;
  if (is_root) {
    check_list(outputs, input, getSize(), "gather");
  } else {
    check_same_kind(input, input, "gather");
    TORCH_CHECK_VALUE(outputs.empty(), "mpi gather: requires empty output on non-root");
  }
  const Tensors list = is_root ? outputs[0] : Tensors{};
  auto streams = DeviceStreams::of(input);
  return submit(
      operation(c10d::OpType::GATHER, "gather", "mpi:gather", opts.timeout), opts.asyncOp,
      static_cast<int64_t>(input.nbytes()), inputs, list, streams,
      [&] { return c10::str("root ", root, ", ", input.scalar_type()); },
      [input, list, root, streams](Waiter& w) {
        Session session(streams.get());
        const bool stage = must_stage(input);
        Dense in(input, stage);
        auto out = dense_list(list, stage);
        char* data = in.load();
        const auto memory = blocks_of(out, Content::Space);
        session.inputs_loaded();
        torch_mpi::gather(w, data, in.bytes(), memory, root, memory_kind(input, stage));
        store_all(out);
        session.outputs_stored();
      });
}

WorkPtr Backend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) {
  const auto& output = only(outputs, "scatter");
  check_root(opts.rootRank, "scatter");
  const int root = static_cast<int>(opts.rootRank);
  const bool is_root = getRank() == root;
  if (is_root) {
    check_list(inputs, output, getSize(), "scatter");
  } else {
    check_same_kind(output, output, "scatter");
    TORCH_CHECK_VALUE(inputs.empty(), "mpi scatter: requires empty input on non-root");
  }
  const Tensors list = is_root ? inputs[0] : Tensors{};
  auto streams = DeviceStreams::of(output);
  return submit(
      operation(c10d::OpType::SCATTER, "scatter", "mpi:scatter", opts.timeout), opts.asyncOp,
      static_cast<int64_t>(output.nbytes()), list, outputs, streams,
      [&] { return c10::str("root ", root, ", ", output.scalar_type()); },
      [output, list, root, streams](Waiter& w) {
        Session session(streams.get());
        const bool stage = must_stage(output);
        Dense out(output, stage);
        auto in = dense_list(list, stage);
        const auto memory = blocks_of(in, Content::Load);
        char* result = out.space();
        session.inputs_loaded();
        torch_mpi::scatter(w, memory, result, out.bytes(), root, memory_kind(output, stage));
        out.store();
        session.outputs_stored();
      });
}

namespace {

// Block p of a tensor cut along its first dimension, as alltoall_base cuts it.
Tensors cut(const at::Tensor& t, const std::vector<int64_t>& splits, int n, const char* side) {
  Tensors parts;
  if (splits.empty()) {
    const auto rows = t.dim() == 0 ? 0 : t.size(0);
    TORCH_CHECK_VALUE(
        t.dim() > 0 && rows % n == 0, "mpi alltoall_base: ", side, " of shape ", t.sizes(),
        " cannot be cut into ", n, " equal parts along its first dimension");
    for (int p = 0; p < n; ++p) {
      parts.push_back(t.narrow(0, p * (rows / n), rows / n));
    }
    return parts;
  }
  int64_t sum = 0;
  for (const auto rows : splits) {
    TORCH_CHECK_VALUE(rows >= 0, "mpi alltoall_base: negative ", side, " split ", rows);
    sum += rows;
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(splits.size()) == n && t.dim() > 0 && sum == t.size(0),
      "mpi alltoall_base: ", side, " splits ", at::IntArrayRef(splits), " do not cut shape ", t.sizes(), " for ", n,
      " ranks");
  int64_t start = 0;
  for (const auto rows : splits) {
    parts.push_back(t.narrow(0, start, rows));
    start += rows;
  }
  return parts;
}

void alltoall_tensors(
    Waiter& w, const Tensors& outputs, const Tensors& inputs, Session& session) {
  const bool stage = must_stage(inputs[0]);
  auto in = dense_list(inputs, stage);
  auto out = dense_list(outputs, stage);
  const auto send = blocks_of(in, Content::Load);
  const auto recv = blocks_of(out, Content::Space);
  session.inputs_loaded();
  exchange(w, send, recv, memory_kind(inputs[0], stage));
  store_all(out);
}

} // namespace

WorkPtr Backend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& opts) {
  check_same_kind(output, input, "alltoall_base");
  const auto inputs = cut(input, input_splits, getSize(), "input");
  const auto outputs = cut(output, output_splits, getSize(), "output");
  TORCH_CHECK_VALUE(
      inputs[getRank()].numel() == outputs[getRank()].numel(),
      "mpi alltoall_base: this rank sends itself ", inputs[getRank()].numel(),
      " elements but expects ", outputs[getRank()].numel());
  auto streams = DeviceStreams::of(input);
  return submit(
      operation(c10d::OpType::ALLTOALL_BASE, "alltoall_base", "mpi:all_to_all", opts.timeout),
      opts.asyncOp, static_cast<int64_t>(input.nbytes()), {input}, {output}, streams,
      [&] { return c10::str(input.scalar_type()); },
      [inputs, outputs, streams](Waiter& w) {
        Session session(streams.get());
        alltoall_tensors(w, outputs, inputs, session);
        session.outputs_stored();
      });
}

WorkPtr Backend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(
      static_cast<int>(inputs.size()) == getSize() && outputs.size() == inputs.size(),
      "mpi alltoall: wanted ", getSize(), " input and output tensors, got ", inputs.size(), " and ",
      outputs.size());
  for (int r = 0; r < getSize(); ++r) {
    check_same_kind(inputs[r], inputs[0], "alltoall");
    check_same_kind(outputs[r], inputs[0], "alltoall");
  }
  auto streams = DeviceStreams::of(inputs[0]);
  return submit(
      operation(c10d::OpType::ALLTOALL, "alltoall", "mpi:all_to_all", opts.timeout), opts.asyncOp,
      total_bytes(inputs), inputs, outputs, streams,
      [&] { return c10::str(inputs[0].scalar_type()); },
      [inputs, outputs, streams](Waiter& w) {
        Session session(streams.get());
        alltoall_tensors(w, outputs, inputs, session);
        session.outputs_stored();
      });
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  return submit(
      operation(c10d::OpType::BARRIER, "barrier", "mpi:barrier", opts.timeout), opts.asyncOp, 0,
      {}, {}, nullptr, [] { return std::string(); },
      [](Waiter& w) {
        if (w.comm.size() > 1) {
          torch_mpi::barrier(w);
        }
      });
}

} // namespace torch_mpi
