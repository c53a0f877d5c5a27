/* Rows of a quantized table, as embeddings look them up.
 *
 * host_ops_lookup  inputs  ids (...) of integers, weight (V, k * bits / 32) uint32, scales and biases (V, k / group),
 *                          all but ids with neighbouring elements along rows
 *                  output  (..., k): scale * code + bias of row ids[...]
 *                  params  bits (1..8), group
 * Layout   The codes of a row are a little-endian bit stream.
 * Numbers  Those of mlx, bit for bit: code and product are rounded to the dtype of the output, and so is the sum. Scales
 *          and biases are taken as numbers of that dtype, so widened for a float32 output. Products and sums of halves
 *          are made in float32, which is wide enough for the second rounding to change nothing.
 * Ids      Negative ones count from the end. Others outside of the table are an error.
 */
#include "common.h"

namespace host_ops {
namespace {

constexpr int64_t kLookupWorth = 1 << 16, kLookupPiece = 1 << 14;

struct Table {
  const accel_array *weight, *scales, *biases, *y;
  int64_t k, bits, group;
};

inline float rounded(float v, int32_t dtype) {
  if (dtype == ACCEL_FLOAT32) return v;
  return dtype == ACCEL_FLOAT16 ? accel_float_from_half(accel_half_from_float(v)) : accel_float_from_bfloat(accel_bfloat_from_float(v));
}

int64_t id_at(const accel_array* ids, int64_t at) {
  switch (ids->dtype) {
    case ACCEL_UINT8: return ((const uint8_t*)ids->data)[at];
    case ACCEL_UINT16: return ((const uint16_t*)ids->data)[at];
    case ACCEL_UINT32: return ((const uint32_t*)ids->data)[at];
    case ACCEL_INT8: return ((const int8_t*)ids->data)[at];
    case ACCEL_INT16: return ((const int16_t*)ids->data)[at];
    case ACCEL_INT32: return ((const int32_t*)ids->data)[at];
    default: return ((const int64_t*)ids->data)[at]; /* uint64 beyond int64 is negative, and outside of the table */
  }
}

void write_row(const Table& t, int64_t id, int64_t at) {
  const uint8_t* codes = (const uint8_t*)((const uint32_t*)t.weight->data + id * t.weight->strides[0]);
  const int32_t dtype = t.y->dtype;
  const uint32_t mask = (1u << t.bits) - 1;
  for (int64_t g = 0; g * t.group < t.k; ++g) {
    const float scale = accel_load_float(t.scales->data, id * t.scales->strides[0] + g, t.scales->dtype);
    const float bias = accel_load_float(t.biases->data, id * t.biases->strides[0] + g, t.biases->dtype);
    for (int64_t i = g * t.group; i < (g + 1) * t.group; ++i) {
      const int64_t bit = i * t.bits, byte = bit / 8, shift = bit % 8;
      uint32_t two = codes[byte];
      if (shift + t.bits > 8) two |= (uint32_t)codes[byte + 1] << 8;
      const float product = rounded((float)((two >> shift) & mask) * scale, dtype);
      accel_store_float(t.y->data, at + i, dtype, product + bias);
    }
  }
}

bool is_float(const accel_array* a) {
  return a->dtype == ACCEL_FLOAT32 || a->dtype == ACCEL_FLOAT16 || a->dtype == ACCEL_BFLOAT16;
}

bool has_rows(const accel_array* a, int64_t rows, int64_t n) {
  return a->ndim == 2 && a->shape[0] == rows && a->shape[1] == n && (n < 2 || a->strides[1] == 1);
}

const char* describe(const accel_call* call, Table& t) {
  if (call->n_inputs != 4 || call->n_outputs != 1 || call->n_params < 2) {
    return "host_ops_lookup: expects ids, weight, scales, biases, one output and parameters bits, group";
  }
  const accel_array* ids = call->inputs[0];
  t.weight = call->inputs[1], t.scales = call->inputs[2], t.biases = call->inputs[3], t.y = call->outputs[0];
  t.bits = call->params[0].i, t.group = call->params[1].i;
  if (ids->dtype < ACCEL_UINT8 || ids->dtype > ACCEL_INT64) return "host_ops_lookup: ids must be integers";
  if (!is_float(t.y) || !is_float(t.scales) || t.biases->dtype != t.scales->dtype || t.weight->dtype != ACCEL_UINT32) {
    return "host_ops_lookup: weight must be uint32; scales, biases and y float32, float16 or bfloat16";
  }
  if (t.y->dtype != ACCEL_FLOAT32 && t.y->dtype != t.scales->dtype) {
    return "host_ops_lookup: y must have the dtype of scales, or be float32";
  }
  if (t.weight->ndim != 2 || t.y->ndim < 1 || t.bits < 1 || t.bits > 8 || t.group < 1) {
    return "host_ops_lookup: shapes or parameters are wrong";
  }
  t.k = t.y->shape[t.y->ndim - 1];
  const int64_t rows = t.weight->shape[0];
  if (t.k % t.group || t.k * t.bits % 32 || t.y->size != ids->size * t.k || !has_rows(t.weight, rows, t.k * t.bits / 32) ||
      !has_rows(t.scales, rows, t.k / t.group) || !has_rows(t.biases, rows, t.k / t.group)) {
    return "host_ops_lookup: shapes do not fit each other";
  }
  return NULL;
}

}  // namespace
}  // namespace host_ops

using namespace host_ops;

ACCEL_KERNEL void host_ops_lookup(const accel_call* call) {
  Table t;
  if (const char* wrong = describe(call, t)) return accel_fail(call, wrong);
  const accel_array* ids = call->inputs[0];
  Rows places(ids); /* ids one by one: `skip` 0 makes every element a row */
  run(call, ids->size, ids->size * t.k, kLookupPiece, kLookupWorth, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = id_at(ids, places.offset(i, 0)), rows = t.weight->shape[0];
      const int64_t row = id < 0 ? id + rows : id;
      if (row < 0 || row >= rows) return accel_fail(call, "host_ops_lookup: an id is outside of the table");
      write_row(t, row, i * t.k);
    }
  });
}
