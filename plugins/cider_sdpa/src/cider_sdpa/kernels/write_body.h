/* Rows that enter a cache. Included once per instruction set; the contract is in cache_write.cpp. */
#ifndef CIDER_SDPA_WRITE_BODY_H
#define CIDER_SDPA_WRITE_BODY_H

#include "rows.h"

namespace cider {
namespace {

/* n neighbouring elements of one dtype to another. */
template <class I, class From, class To>
void convert(const typename From::Element* from, typename To::Element* to, int64_t n) {
  int64_t c = 0;
  for (; c + 16 <= n; c += 16) I::put(To(), to + c, I::get(From(), from + c), 16);
  if (c < n) I::put(To(), to + c, I::get_part(From(), from + c, (int)(n - c)), (int)(n - c));
}

template <class I>
void convert_row(const void* from, int32_t from_dtype, void* to, int32_t to_dtype, int64_t n) {
  if (from_dtype == to_dtype) {
    memcpy(to, from, (size_t)n * accel_itemsize(to_dtype));
  } else if (from_dtype == ACCEL_FLOAT32) {
    if (to_dtype == ACCEL_FLOAT16) return convert<I, F32, F16>((const float*)from, (uint16_t*)to, n);
    convert<I, F32, BF16>((const float*)from, (uint16_t*)to, n);
  } else if (from_dtype == ACCEL_FLOAT16) {
    if (to_dtype == ACCEL_FLOAT32) return convert<I, F16, F32>((const uint16_t*)from, (float*)to, n);
    convert<I, F16, BF16>((const uint16_t*)from, (uint16_t*)to, n);
  } else {
    if (to_dtype == ACCEL_FLOAT32) return convert<I, BF16, F32>((const uint16_t*)from, (float*)to, n);
    convert<I, BF16, F16>((const uint16_t*)from, (uint16_t*)to, n);
  }
}

template <class I>
void write_heads(void* arg, int64_t begin, int64_t end) {
  const CacheRows& r = *(const CacheRows*)arg;
  const int64_t in = (int64_t)accel_itemsize(r.from.dtype), out = (int64_t)accel_itemsize(r.dtype);
  const int64_t* s = r.from.stride;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t bh = item / r.count, i = item % r.count;
    const int64_t at = bh / r.heads * s[0] + bh % r.heads * s[1] + i * s[2];
    const char* from = (const char*)r.from.data + at * in;
    char* to = (char*)r.to + (bh * r.capacity + r.offset + i) * r.width * out;
    if (s[3] == 1 || r.width == 1) {
      convert_row<I>(from, r.from.dtype, to, r.dtype, r.width);
    } else {
      for (int64_t c = 0; c < r.width; ++c) convert_row<I>(from + c * s[3] * in, r.from.dtype, to + c * out, r.dtype, 1);
    }
  }
}

/* Fewer elements than this are not worth waking a thread for. */
constexpr int64_t kParallelElements = 65536;

template <class I>
void write_rows(const CacheRows& r) {
  CacheRows job = r;
  const int64_t items = r.batch * r.heads * r.count;
  if (items * r.width < kParallelElements) return write_heads<I>(&job, 0, items);
  accel_parallel_for(r.call, items, ceil_div(kParallelElements / 4, r.width), write_heads<I>, &job);
}

}  // namespace
}  // namespace cider
#endif
