/* Python functions affine_reference and dense_reference. */
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "call.h"
#include "reference.h"

using namespace nanobind::literals;

namespace accel {
namespace {

template <typename T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::object new_matrix(size_t rows, size_t cols, double*& data) {
  data = new double[std::max<size_t>(rows * cols, 1)];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<double*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, double, nb::ndim<2>>(data, {rows, cols}, owner));
}

void check_rows(int64_t begin, int64_t end, size_t n) {
  if (begin < 0 || end < begin || size_t(end) > n) {
    throw nb::value_error(("rows [" + std::to_string(begin) + ", " + std::to_string(end) + ") are not within the " +
                           std::to_string(n) + " rows of w")
                              .c_str());
  }
}

nb::tuple affine(Matrix<double> x, Matrix<uint32_t> w, Matrix<float> scales, Matrix<float> biases, int bits,
                 int group_size, int64_t row_begin, int64_t row_end) {
  const size_t m = x.shape(0), k = x.shape(1), n = w.shape(0);
  const bool known = (bits >= 1 && bits <= 6) || bits == 8;
  if (!known || group_size <= 0 || group_size % 32 || k % group_size) {
    throw nb::value_error("bits must be 1 to 6 or 8, group_size a multiple of 32, and K a multiple of group_size");
  }
  if (w.shape(1) != k * bits / 32) throw nb::value_error("w must have K * bits / 32 columns");
  for (auto* s : {&scales, &biases}) {
    if (s->shape(0) != n || s->shape(1) != k / group_size) {
      throw nb::value_error("scales and biases must have the shape (N, K / group_size)");
    }
  }
  if (row_end < 0) row_end = int64_t(n);
  check_rows(row_begin, row_end, n);
  double *y, *mag;
  nb::object out_y = new_matrix(m, row_end - row_begin, y), out_mag = new_matrix(m, row_end - row_begin, mag);
  {
    nb::gil_scoped_release release;
    reference::affine({x.data(), int64_t(m), int64_t(k), row_begin, row_end, y, mag}, w.data(), scales.data(),
                      biases.data(), bits, group_size);
  }
  return nb::make_tuple(out_y, out_mag);
}

/* Codes are never converted: another dtype is a mistake of the caller. */
template <typename T>
Matrix<T> weights(nb::handle w) {
  Matrix<T> matrix;
  if (!nb::try_cast(w, matrix, false)) {
    throw nb::type_error("w must be a C-contiguous numpy matrix of the dtype's type, or of uint16 for half precision");
  }
  return matrix;
}

template <typename T>
nb::tuple dense(Matrix<double> x, Matrix<T> w, reference::Dense kind, int64_t row_begin, int64_t row_end) {
  const size_t m = x.shape(0), k = x.shape(1), n = w.shape(0);
  if (w.shape(1) != k) throw nb::value_error("w must have K columns");
  if (row_end < 0) row_end = int64_t(n);
  check_rows(row_begin, row_end, n);
  double *y, *mag;
  nb::object out_y = new_matrix(m, row_end - row_begin, y), out_mag = new_matrix(m, row_end - row_begin, mag);
  {
    nb::gil_scoped_release release;
    reference::dense({x.data(), int64_t(m), int64_t(k), row_begin, row_end, y, mag}, w.data(), kind);
  }
  return nb::make_tuple(out_y, out_mag);
}

} // namespace

void register_reference(nb::module_& m) {
  m.def("affine_reference", &affine, "x"_a, "w"_a.noconvert(), "scales"_a, "biases"_a, "bits"_a, "group_size"_a,
        "row_begin"_a = 0, "row_end"_a = -1,
        "(y, magnitude) of x @ W[row_begin:row_end].T in float64, both (M, rows): y = sum(w * x) and magnitude = "
        "sum(|w * x|) over K, with w = scale * q + bias in float64.\n\n"
        "x: float64 (M, K); w: uint32 (N, K * bits / 32); scales, biases: float32 (N, K / group_size).");
  m.def(
      "dense_reference",
      [](Matrix<double> x, nb::object w, std::string dtype, int64_t row_begin, int64_t row_end) {
        if (dtype == "float32") {
          return dense(x, weights<float>(w), reference::Dense::Float32, row_begin, row_end);
        }
        if (dtype == "float16" || dtype == "bfloat16") {
          const auto kind = dtype == "float16" ? reference::Dense::Float16 : reference::Dense::Bfloat16;
          return dense(x, weights<uint16_t>(w), kind, row_begin, row_end);
        }
        throw nb::value_error("dtype must be \"float32\", \"float16\" or \"bfloat16\"");
      },
      "x"_a, "w"_a, "dtype"_a = "float32", "row_begin"_a = 0, "row_end"_a = -1,
      "As affine_reference, with dense weights (N, K): float32, or the bits of float16 / bfloat16 as uint16.");
}

} // namespace accel
