// Two kernels for the tests: sums of rows, and a copy that needs nothing.

// The sum of a row that lies anywhere.
template <typename X>
METAL_FUNC float row_sum(X x, int length, ushort lane) {
  float sum = 0.0f; /* of what
  this lane has */
  for (int i = lane; i < length; i += 32) {
    sum += float(x[i]);
  }
  return simd_sum(sum);
}

// --- kernel row_sums ---
threadgroup float parts[GROUPS];
// One SIMD group for each part of the row.
const int length = x_shape[1];
const int part = length / GROUPS;
const uint row = threadgroup_position_in_grid.x;
const float sum = row_sum(x + row * length + simdgroup_index_in_threadgroup * part, part, thread_index_in_simdgroup);
if (thread_index_in_simdgroup == 0) {
  parts[simdgroup_index_in_threadgroup] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_threadgroup == 0) {
  float total = 0.0f;
  for (int g = 0; g < GROUPS; g++) {
    total += parts[g];
  }
  y[row] = T(TWICE ? 2.0f * total : total);
}
// --- kernel copied ---
y[thread_position_in_grid.x] = x[thread_position_in_grid.x];
