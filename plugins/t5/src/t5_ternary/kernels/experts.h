/* t5_experts: y[i, m] = x[i, m] @ W[indices[i]].T (+ bias[indices[i]]), products with the matrices that rows ask for.
 *
 * Method     Rows are brought together by expert. Experts that are asked for by up to kSmallRows rows are cut into
 *            pieces of columns, one parallel loop over all of them: a token asks for a few experts, each too small for
 *            many threads. The others take the product of many rows, one after the other, each with all threads.
 * Rows       A row has the bits that t5_matmul gives it among as many rows as its expert has, so that rows of calls in
 *            which no expert has more than kSmallRows do not depend on each other.
 */
#ifndef T5_EXPERTS_H
#define T5_EXPERTS_H

#include <accel/slots.h>

#include "problem.h"

namespace t5 {
namespace {

/* A call whose loops run on the calling thread, or on the pool's as usual, and whose scratch memory is used again: that
 * of a task comes from the task's own memory, that of the many rows of an expert served the expert before. */
struct Borrowed {
  accel_call call;
  accel_host host;
  const accel_call* real;
  char *next, *end; /* a task's memory, or NULL */
  /* The other case: blocks of memory, their sizes, how many there are, and which are in use. */
  void* block[32];
  size_t size[32];
  int blocks;
  uint32_t used;

  void begin(const accel_call* of, bool serial) {
    real = of;
    call = *of;
    host = *of->host;
    host.scratch = scratch;
    host.parallel_for = serial ? in_turn : pool;
    host.fail = fail;
    call.host = &host;
    if (serial) call.threads = 1;
    next = end = NULL;
    blocks = 0;
    used = 0;
  }
  static Borrowed& of(const accel_call* c) { return *(Borrowed*)c; } /* its first member */
  static void in_turn(const accel_call*, int64_t n, int64_t grain, accel_task task, void* arg) {
    for (int64_t i = 0; i < n; i += grain) task(arg, i, least(i + grain, n));
  }
  static void pool(const accel_call* c, int64_t n, int64_t grain, accel_task task, void* arg) {
    const accel_call* real = of(c).real;
    accel_parallel_for(real, n, grain, task, arg);
  }
  static void fail(const accel_call* c, const char* message) { accel_fail(of(c).real, message); }
  static void* scratch(const accel_call* c, size_t bytes) {
    Borrowed& b = of(c);
    bytes = (bytes + 63) / 64 * 64;
    if (b.end) {
      if ((size_t)(b.end - b.next) < bytes) {
        accel_fail(b.real, "t5_experts: a task has too little memory"); /* task_bytes is wrong */
        return NULL;
      }
      void* found = b.next;
      b.next += bytes;
      return found;
    }
    int best = -1;
    for (int i = 0; i < b.blocks; ++i) {
      if (!(b.used >> i & 1) && b.size[i] >= bytes && (best < 0 || b.size[i] < b.size[best])) best = i;
    }
    if (best < 0) {
      void* found = accel_scratch(b.real, bytes);
      if (!found || b.blocks == 32) return found;
      best = b.blocks++;
      b.block[best] = found;
      b.size[best] = bytes;
    }
    b.used |= 1u << best;
    return b.block[best];
  }
};

struct Experts {
  const accel_call* call;
  const Bodies* bodies;
  const accel_array *x, *w, *scales, *bias, *y;
  Problem p;           /* of an expert: n, k, group, facts */
  int64_t pairs, m;    /* how many indices there are, and rows to each */
  int64_t* offset;     /* per pair, of its first row in x */
  int64_t* order;      /* pairs by expert */
  int64_t* first;      /* per expert: its first place in order; one more at the end */
  int64_t* small;      /* experts with few rows */
  int64_t n_small, parts, columns; /* pieces of their columns */
  accel_slots::Slots slots;

  int64_t rows_of(int64_t e) const { return (first[e + 1] - first[e]) * m; }

  /* Bytes that a body of few rows may ask for, at most: x as floats in the order of the digits, or as planes; a row; and
   * what the rows left over share. */
  int64_t body_bytes(int64_t rows) const { return rows * p.k * 5 + p.k * 13 + 512; }
  int64_t task_bytes(int64_t rows) const {
    const int64_t x_bytes = rows * p.k * (int64_t)accel_itemsize(x->dtype), y_bytes = rows * columns * 4;
    return body_bytes(rows) + x_bytes + y_bytes + 256;
  }

  /* Rows of an expert, `count` from row `from` on, one behind the other. */
  void gather(int64_t e, int64_t from, int64_t count, char* to) const {
    const int64_t item = (int64_t)accel_itemsize(x->dtype), row = x->strides[x->ndim - 2];
    const int64_t step = x->strides[x->ndim - 1];
    for (int64_t i = from; i < from + count; ++i, to += p.k * item) {
      const char* at = (const char*)x->data + (offset[order[first[e] + i / m]] + i % m * row) * item;
      if (step == 1) {
        memcpy(to, at, (size_t)(p.k * item));
      } else {
        for (int64_t j = 0; j < p.k; ++j) memcpy(to + j * item, at + j * step * item, (size_t)item);
      }
    }
  }
  void scatter(int64_t e, int64_t from, int64_t count, int64_t n0, int64_t n, const char* y_rows) const {
    const int64_t item = (int64_t)accel_itemsize(y->dtype);
    for (int64_t i = from; i < from + count; ++i, y_rows += n * item) {
      char* to = (char*)y->data + ((order[first[e] + i / m] * m + i % m) * p.n + n0) * item;
      memcpy(to, y_rows, (size_t)(n * item));
    }
  }

  /* Columns n0 ... n0 + n of some rows of an expert. */
  void product(const accel_call* with, int64_t e, int64_t rows, int64_t n0, int64_t n, char* x_rows, char* y_rows,
               bool few) const {
    const int64_t shape[2] = {rows, p.k}, strides[2] = {p.k, 1};
    const accel_array of_x = {x_rows, shape, strides, rows * p.k, 2, x->dtype};
    Problem one = p;
    one.call = with;
    one.rows = rows;
    one.n = n;
    one.x = &of_x;
    one.w = (const uint8_t*)w->data + e * w->strides[0] + n0 * p.w_stride;
    const int64_t item = (int64_t)accel_itemsize(scales->dtype);
    one.scales = (const char*)scales->data + (e * scales->strides[0] + n0 * p.s_stride[0]) * item;
    accel_array of_bias;
    if (bias) {
      of_bias = *bias;
      const int64_t at = e * bias->strides[0] + n0 * bias->strides[1];
      of_bias.data = (char*)bias->data + at * (int64_t)accel_itemsize(bias->dtype);
      of_bias.shape = &one.n;
      of_bias.strides = bias->strides + 1;
      of_bias.ndim = 1;
      of_bias.size = n;
      one.bias = &of_bias;
    }
    one.y = y_rows;
    (few ? bodies->small : bodies->large)(one);
  }

  static void piece(void* arg, int64_t begin, int64_t end) {
    const Experts& job = *(const Experts*)arg;
    const int32_t slot = job.slots.take();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = job.small[i / job.parts], n0 = i % job.parts * job.columns, rows = job.rows_of(e);
      const int64_t n = least(job.columns, job.p.n - n0);
      if (n <= 0) continue;
      Borrowed borrowed;
      borrowed.begin(job.call, true);
      borrowed.next = (char*)job.slots.of(slot);
      borrowed.end = borrowed.next + job.task_bytes(rows);
      char* x = (char*)Borrowed::scratch(&borrowed.call, (size_t)(rows * job.p.k) * accel_itemsize(job.x->dtype));
      char* y = (char*)Borrowed::scratch(&borrowed.call, (size_t)(rows * n) * accel_itemsize(job.y->dtype));
      if (!x || !y) break;
      job.gather(e, 0, rows, x);
      job.product(&borrowed.call, e, rows, n0, n, x, y, true);
      job.scatter(e, 0, rows, n0, n, y);
    }
    job.slots.give(slot);
  }

  void many(int64_t e, Borrowed& borrowed) const {
    const int64_t rows = rows_of(e), most = 1024;
    for (int64_t from = 0; from < rows; from += most) {
      const int64_t count = least(most, rows - from);
      borrowed.used = 0;
      char* of_x = (char*)Borrowed::scratch(&borrowed.call, (size_t)(count * p.k) * accel_itemsize(x->dtype));
      char* of_y = (char*)Borrowed::scratch(&borrowed.call, (size_t)(count * p.n) * accel_itemsize(y->dtype));
      if (!of_x || !of_y) return;
      gather(e, from, count, of_x);
      product(&borrowed.call, e, count, 0, p.n, of_x, of_y, false);
      scatter(e, from, count, 0, p.n, of_y);
    }
  }
};

/* Offsets of the pairs' rows in x, whose leading dimensions are those of the indices or 1. */
inline void find_rows(const accel_array* x, const accel_array* indices, int64_t* offset) {
  for (int64_t i = 0; i < indices->size; ++i) {
    int64_t rest = i, at = 0;
    for (int32_t d = indices->ndim - 1; d >= 0; --d) {
      const int64_t j = rest % indices->shape[d];
      rest /= indices->shape[d];
      if (x->shape[d] != 1) at += j * x->strides[d];
    }
    offset[i] = at;
  }
}

/* Runs a call that `describe_experts` has looked at. */
inline void run_experts(Experts& job, const accel_array* indices) {
  const int64_t experts = job.w->shape[0];
  job.offset = (int64_t*)accel_scratch(job.call, (size_t)(2 * job.pairs + 2 * experts + 1) * sizeof(int64_t));
  if (!job.offset) return;
  job.order = job.offset + job.pairs;
  job.first = job.order + job.pairs;
  job.small = job.first + experts + 1;
  find_rows(job.x, indices, job.offset);
  /* By counting: `small` serves as the next place of each expert first. */
  for (int64_t e = 0; e <= experts; ++e) job.first[e] = 0;
  auto expert_of = [&](int64_t i) {
    int64_t rest = i, at = 0;
    for (int32_t d = indices->ndim - 1; d >= 0; --d) {
      at += rest % indices->shape[d] * indices->strides[d];
      rest /= indices->shape[d];
    }
    return (int64_t)((const uint32_t*)indices->data)[at];
  };
  for (int64_t i = 0; i < job.pairs; ++i) {
    const int64_t e = expert_of(i);
    if (e >= experts) return accel_fail(job.call, "t5_experts: an index is not below the number of experts");
    ++job.first[e + 1];
  }
  for (int64_t e = 0; e < experts; ++e) {
    job.first[e + 1] += job.first[e];
    job.small[e] = job.first[e];
  }
  for (int64_t i = 0; i < job.pairs; ++i) job.order[job.small[expert_of(i)]++] = i;

  int64_t most = 0;
  job.n_small = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = job.rows_of(e);
    if (rows == 0 || rows > kSmallRows) continue;
    job.small[job.n_small++] = e;
    if (rows > most) most = rows;
  }
  if (job.n_small) {
    /* A piece prepares x anew, which costs as much as some dozen columns. */
    const int64_t wanted = ceil_div(4 * job.call->threads, job.n_small), able = ceil_div(job.p.n, 128);
    job.parts = job.call->threads < 2 ? 1 : least(wanted, able);
    job.columns = ceil_div(ceil_div(job.p.n, job.parts), 16) * 16;
    if (!job.slots.make(job.call, job.task_bytes(most) / 4 + 16)) return;
    accel_parallel_for(job.call, job.n_small * job.parts, 1, Experts::piece, &job);
  }
  Borrowed borrowed;
  borrowed.begin(job.call, false);
  for (int64_t e = 0; e < experts; ++e) {
    if (job.rows_of(e) > kSmallRows) job.many(e, borrowed);
  }
}

}  // namespace
}  // namespace t5
#endif
