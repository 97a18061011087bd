#include "datatypes.hpp"

#include <c10/util/Exception.h>

namespace torch_mpi {

namespace {

using at::ScalarType;

bool is_float8(ScalarType t) {
  switch (t) {
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e4m3fnuz:
    case ScalarType::Float8_e5m2fnuz:
    case ScalarType::Float8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

bool is_integer(ScalarType t) {
  switch (t) {
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::UInt16:
    case ScalarType::UInt32:
    case ScalarType::UInt64:
      return true;
    default:
      return false;
  }
}

// Bytes hold 0 or 1 for bool, so the logical operations are the bitwise ones.
ReduceKind bool_kind(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::MAX:
    case c10d::ReduceOp::BOR:
      return ReduceKind::BitOr;
    case c10d::ReduceOp::PRODUCT:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::BAND:
      return ReduceKind::BitAnd;
    case c10d::ReduceOp::BXOR:
      return ReduceKind::BitXor;
    default:
      TORCH_CHECK_VALUE(false, "mpi: AVG and PREMUL_SUM have no meaning for torch.bool");
  }
}

ReduceKind number_kind(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceKind::Sum;
    case c10d::ReduceOp::PRODUCT:
      return ReduceKind::Prod;
    case c10d::ReduceOp::MIN:
      return ReduceKind::Min;
    case c10d::ReduceOp::MAX:
      return ReduceKind::Max;
    case c10d::ReduceOp::BAND:
      return ReduceKind::BitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceKind::BitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceKind::BitXor;
    default:
      TORCH_CHECK_VALUE(false, "mpi: unknown reduce operation ", static_cast<int>(op));
  }
}

} // namespace

Reduction make_reduction(const c10d::ReduceOp& op, ScalarType dtype, int group_size) {
  TORCH_CHECK_VALUE(
      !is_float8(dtype),
      "mpi: cannot reduce ", dtype, " (float8 tensors can only be moved): cast to bfloat16 or float32 first");
  Reduction r{dtype, dtype, ReduceKind::Sum, 1};
  if (dtype == ScalarType::Bool) {
    r.kind = bool_kind(op.op_);
    return r;
  }
  r.kind = number_kind(op.op_);
  const bool bitwise = r.kind == ReduceKind::BitAnd || r.kind == ReduceKind::BitOr ||
      r.kind == ReduceKind::BitXor;
  TORCH_CHECK_VALUE(
      !bitwise || is_integer(dtype),
      "mpi: ", reduce_op_name(op), " needs an integer or bool tensor, got ", dtype);
  const bool ordered = r.kind == ReduceKind::Min || r.kind == ReduceKind::Max;
  TORCH_CHECK_VALUE(
      !ordered || !c10::isComplexType(dtype),
      "mpi: ", reduce_op_name(op), " needs an ordered dtype, got ", dtype);
  if (dtype == ScalarType::Half || dtype == ScalarType::BFloat16) {
    r.acc = ScalarType::Float;
  }
  mpi_type(r.acc); // rejects what MPI cannot name
  if (op.op_ == c10d::ReduceOp::AVG) {
    r.divisor = group_size;
  }
  return r;
}

MPI_Datatype mpi_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
    case ScalarType::Bool:
      return MPI_UINT8_T;
    case ScalarType::Char:
      return MPI_INT8_T;
    case ScalarType::Short:
      return MPI_INT16_T;
    case ScalarType::Int:
      return MPI_INT32_T;
    case ScalarType::Long:
      return MPI_INT64_T;
    case ScalarType::UInt16:
      return MPI_UINT16_T;
    case ScalarType::UInt32:
      return MPI_UINT32_T;
    case ScalarType::UInt64:
      return MPI_UINT64_T;
    case ScalarType::Float:
      return MPI_FLOAT;
    case ScalarType::Double:
      return MPI_DOUBLE;
    case ScalarType::ComplexFloat:
      return MPI_C_FLOAT_COMPLEX;
    case ScalarType::ComplexDouble:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      TORCH_CHECK_VALUE(false, "mpi: reductions are not supported for dtype ", dtype);
  }
}

MPI_Op mpi_op(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::Sum:
      return MPI_SUM;
    case ReduceKind::Prod:
      return MPI_PROD;
    case ReduceKind::Min:
      return MPI_MIN;
    case ReduceKind::Max:
      return MPI_MAX;
    case ReduceKind::BitAnd:
      return MPI_BAND;
    case ReduceKind::BitOr:
      return MPI_BOR;
    case ReduceKind::BitXor:
      return MPI_BXOR;
  }
  return MPI_OP_NULL;
}

const char* reduce_op_name(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "SUM";
    case c10d::ReduceOp::AVG:
      return "AVG";
    case c10d::ReduceOp::PRODUCT:
      return "PRODUCT";
    case c10d::ReduceOp::MIN:
      return "MIN";
    case c10d::ReduceOp::MAX:
      return "MAX";
    case c10d::ReduceOp::BAND:
      return "BAND";
    case c10d::ReduceOp::BOR:
      return "BOR";
    case c10d::ReduceOp::BXOR:
      return "BXOR";
    case c10d::ReduceOp::PREMUL_SUM:
      return "PREMUL_SUM";
    default:
      return "unknown";
  }
}

} // namespace torch_mpi
