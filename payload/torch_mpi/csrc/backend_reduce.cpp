// allreduce, reduce and reduce_scatter on tensors.
#include "arguments.hpp"
#include "backend.hpp"
#include "errors.hpp"

namespace torch_mpi {

namespace {

void check_dense(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(
      t.layout() == at::kStrided, "mpi ", name, ": sparse tensors are not supported, got layout ",
      t.layout(), "; densify with .to_dense() or use the gloo backend");
}

// MPI cannot scale, widen or average device memory: such reductions go through the host.
bool stage_reduction(const at::Tensor& t, const Reduction& r) {
  return !t.device().is_cpu() && (must_stage(t) || r.widened() || r.divisor != 1);
}

std::string say_reduction(const c10d::ReduceOp& op, const std::string& rest) {
  return c10::str(reduce_op_name(op), ", ", rest);
}

// PREMUL_SUM multiplies each rank's contribution before it is added.
bool premultiplies(const c10d::ReduceOp& op) {
  return op.op_ == c10d::ReduceOp::PREMUL_SUM;
}

at::Tensor premultiplied(const at::Tensor& t, const c10d::ReduceOp& op) {
  const auto* factor = reinterpret_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(
      factor != nullptr,
      "mpi: PREMUL_SUM without a factor; make it with torch.distributed._make_nccl_premul_sum");
  if (factor->tensor_factor.defined()) {
    return at::mul(t, factor->tensor_factor.to(t.device()).to(t.scalar_type()).reshape({}));
  }
  return at::mul(t, factor->double_factor).to(t.scalar_type());
}

// One tensor reduced over all ranks, wherever it lives.
void allreduce_tensor(
    Waiter& w, const at::Tensor& t, const Reduction& r, const c10d::ReduceOp& op, Session& session) {
  if (premultiplies(op)) {
    t.copy_(premultiplied(t, op));
  }
  const bool stage = stage_reduction(t, r);
  Dense dense(t, stage);
  char* data = dense.load();
  session.inputs_loaded();
  if (t.numel() > 0 && w.comm.size() > 1) {
    allreduce(w, data, t.numel(), r, memory_kind(t, stage));
  } else if (w.comm.size() == 1) {
    // A group of one: SUM, AVG and all others return the tensor as it is.
  }
  dense.store();
}

} // namespace

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto& t = only(tensors, "allreduce");
  check_dense(t, "allreduce");
  const auto r = make_reduction(opts.reduceOp, t.scalar_type(), getSize());
  auto op = operation(c10d::OpType::ALLREDUCE, "allreduce", "mpi:all_reduce", opts.timeout);
  const auto bytes = static_cast<int64_t>(t.nbytes());
  const auto say = [&] { return say_reduction(opts.reduceOp, describe_tensor(t)); };
  if (plain_host(t) && !premultiplies(opts.reduceOp) && getSize() > 1) {
    return submit(op, opts.asyncOp, bytes, tensors, tensors, nullptr, say, [t, r](Waiter& w) {
      if (t.numel() > 0) {
        torch_mpi::allreduce(w, t.data_ptr(), t.numel(), r, Memory::Host);
      }
    });
  }
  auto streams = DeviceStreams::of(t);
  return submit(
      op, opts.asyncOp, bytes, tensors, tensors, streams, say,
      [t, r, reduce_op = opts.reduceOp, streams](Waiter& w) {
        Session session(streams.get());
        allreduce_tensor(w, t, r, reduce_op, session);
        session.outputs_stored();
      });
}

WorkPtr Backend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "mpi allreduce_coalesced: no tensors");
  for (const auto& t : tensors) {
    check_dense(t, "allreduce_coalesced");
    TORCH_CHECK_VALUE(
        t.scalar_type() == tensors[0].scalar_type() && t.device() == tensors[0].device(),
        "mpi allreduce_coalesced: tensors must have one dtype and device, got ",
        describe_tensor(tensors[0]), " and ", describe_tensor(t));
  }
  const auto r = make_reduction(opts.reduceOp, tensors[0].scalar_type(), getSize());
  auto op = operation(
      c10d::OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", "mpi:all_reduce", opts.timeout);
  auto streams = DeviceStreams::of(tensors[0]);
  const auto bytes = total_bytes(tensors);
  return submit(
      op, opts.asyncOp, bytes, tensors, tensors, streams,
      [&] { return say_reduction(opts.reduceOp, describe_tensors(tensors)); },
      [tensors, r, reduce_op = opts.reduceOp, streams, bytes](Waiter& w) {
        Session session(streams.get());
        if (bytes <= kChunkBytes) {
          // Many small tensors are one message.
          Tensors flat;
          for (const auto& t : tensors) {
            flat.push_back(t.reshape({-1}));
          }
          auto all = at::cat(flat);
          allreduce_tensor(w, all, r, reduce_op, session);
          int64_t start = 0;
          for (const auto& t : tensors) {
            t.copy_(all.narrow(0, start, t.numel()).view(t.sizes()));
            start += t.numel();
          }
        } else {
          for (const auto& t : tensors) {
            allreduce_tensor(w, t, r, reduce_op, session);
          }
        }
        session.outputs_stored();
      });
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto& t = only(tensors, "reduce");
  check_dense(t, "reduce");
  check_root(opts.rootRank, "reduce");
  const auto r = make_reduction(opts.reduceOp, t.scalar_type(), getSize());
  auto op = operation(c10d::OpType::REDUCE, "reduce", "mpi:reduce", opts.timeout);
  auto streams = DeviceStreams::of(t);
  const int root = static_cast<int>(opts.rootRank);
  return submit(
      op, opts.asyncOp, static_cast<int64_t>(t.nbytes()), tensors, tensors, streams,
      [&] { return say_reduction(opts.reduceOp, c10::str("root ", root, ", ", describe_tensor(t))); },
      [t, r, root, reduce_op = opts.reduceOp, streams](Waiter& w) {
        Session session(streams.get());
        const bool stage = stage_reduction(t, r);
        const bool is_root = w.comm.rank() == root;
        const auto source = premultiplies(reduce_op) ? premultiplied(t, reduce_op) : t;
        Dense dense(source, stage);
        char* data = dense.load();
        session.inputs_loaded();
        if (t.numel() > 0 && w.comm.size() > 1) {
          torch_mpi::reduce(w, data, t.numel(), r, root, memory_kind(t, stage));
        }
        if (is_root) {
          dense.store();
          if (!source.is_same(t)) {
            t.copy_(source);
          }
        }
        session.outputs_stored();
      });
}

namespace {

// `blocks` holds one input for each rank.
void reduce_scatter_tensors(
    Waiter& w,
    const at::Tensor& output,
    const Tensors& blocks,
    const Reduction& r,
    const c10d::ReduceOp& op,
    Session& session) {
  Tensors inputs;
  for (const auto& block : blocks) {
    inputs.push_back(premultiplies(op) ? premultiplied(block, op) : block);
  }
  const bool stage = stage_reduction(output, r);
  Dense out(output, stage);
  if (memory_kind(output, stage) == Memory::Device) {
    Tensors flat;
    for (const auto& input : inputs) {
      TORCH_CHECK_VALUE(
          input.numel() == output.numel(),
          "mpi reduce_scatter: device tensors must be of equal size on all ranks");
      flat.push_back(input.reshape({-1}));
    }
    Dense packed(at::cat(flat), false);
    char* data = packed.load();
    char* result = out.space();
    session.inputs_loaded();
    reduce_scatter_library(w, result, data, output.numel(), r);
  } else {
    auto list = dense_list(inputs, stage);
    const auto memory = blocks_of(list, Content::Load);
    char* result = out.space();
    session.inputs_loaded();
    torch_mpi::reduce_scatter(w, result, memory, r);
  }
  out.store();
}

Tensors equal_blocks(const at::Tensor& input, const at::Tensor& output, int n, const char* name) {
  TORCH_CHECK_VALUE(
      input.numel() == output.numel() * n, "mpi ", name, ": input of ", input.numel(),
      " elements, wanted output's ", output.numel(), " times the group's size ", n);
  TORCH_CHECK_VALUE(
      input.scalar_type() == output.scalar_type(), "mpi ", name, ": input is ",
      input.scalar_type(), ", output is ", output.scalar_type());
  const auto flat = input.reshape({-1});
  Tensors blocks;
  for (int p = 0; p < n; ++p) {
    blocks.push_back(flat.narrow(0, p * output.numel(), output.numel()));
  }
  return blocks;
}

} // namespace

WorkPtr Backend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  const auto& output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(
      inputs.size() == 1 && static_cast<int>(inputs[0].size()) == getSize(),
      "mpi reduce_scatter: wanted one list of ", getSize(), " input tensors");
  check_dense(output, "reduce_scatter");
  const auto& mine = inputs[0][getRank()];
  TORCH_CHECK_VALUE(
      mine.numel() == output.numel(), "mpi reduce_scatter: output of shape ", output.sizes(),
      ", but the input for this rank has shape ", mine.sizes());
  for (const auto& input : inputs[0]) {
    check_dense(input, "reduce_scatter");
    TORCH_CHECK_VALUE(
        input.scalar_type() == output.scalar_type() && input.device() == output.device(),
        "mpi reduce_scatter: input is ", input.scalar_type(), " on ", input.device(),
        ", output is ", output.scalar_type(), " on ", output.device());
  }
  const auto r = make_reduction(opts.reduceOp, output.scalar_type(), getSize());
  auto op = operation(
      c10d::OpType::REDUCE_SCATTER, "reduce_scatter", "mpi:reduce_scatter", opts.timeout);
  auto streams = DeviceStreams::of(output);
  return submit(
      op, opts.asyncOp, total_bytes(inputs[0]), inputs[0], outputs, streams,
      [&] { return say_reduction(opts.reduceOp, describe_tensors(inputs[0])); },
      [output, blocks = inputs[0], r, reduce_op = opts.reduceOp, streams](Waiter& w) {
        Session session(streams.get());
        reduce_scatter_tensors(w, output, blocks, r, reduce_op, session);
        session.outputs_stored();
      });
}

WorkPtr Backend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  check_dense(output, "reduce_scatter_tensor");
  check_dense(input, "reduce_scatter_tensor");
  const auto r = make_reduction(opts.reduceOp, output.scalar_type(), getSize());
  const auto blocks = equal_blocks(input, output, getSize(), "reduce_scatter_tensor");
  auto op = operation(
      c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", "mpi:_reduce_scatter_base",
      opts.timeout);
  auto streams = DeviceStreams::of(output);
  return submit(
      op, opts.asyncOp, static_cast<int64_t>(input.nbytes()), {input}, {output}, streams,
      [&] { return say_reduction(opts.reduceOp, describe_tensor(input)); },
      [output = output, blocks, r, reduce_op = opts.reduceOp, streams](Waiter& w) {
        Session session(streams.get());
        reduce_scatter_tensors(w, output, blocks, r, reduce_op, session);
        session.outputs_stored();
      });
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(
      !outputs.empty() && outputs.size() == inputs.size(),
      "mpi reduce_scatter_tensor_coalesced: ", outputs.size(), " outputs for ", inputs.size(),
      " inputs");
  std::vector<Tensors> blocks;
  std::vector<Reduction> reductions;
  for (size_t i = 0; i < outputs.size(); ++i) {
    blocks.push_back(
        equal_blocks(inputs[i], outputs[i], getSize(), "reduce_scatter_tensor_coalesced"));
    reductions.push_back(make_reduction(opts.reduceOp, outputs[i].scalar_type(), getSize()));
  }
  auto op = operation(
      c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, "reduce_scatter_tensor_coalesced",
      "mpi:reduce_scatter_tensor_coalesced", opts.timeout);
  auto streams = DeviceStreams::of(outputs[0]);
  return submit(
      op, opts.asyncOp, total_bytes(inputs), inputs, outputs, streams,
      [&] { return say_reduction(opts.reduceOp, describe_tensors(inputs)); },
      [outputs, blocks, reductions, reduce_op = opts.reduceOp, streams](Waiter& w) {
        Session session(streams.get());
        for (size_t i = 0; i < outputs.size(); ++i) {
          reduce_scatter_tensors(w, outputs[i], blocks[i], reductions[i], reduce_op, session);
        }
        session.outputs_stored();
      });
}

} // namespace torch_mpi
