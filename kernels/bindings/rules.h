/* How the shapes and dtypes of a kernel's outputs follow from its inputs. */
#pragma once

#include <string>
#include <vector>

#include "mlx/array.h"

namespace accel {

namespace mx = mlx::core;

/* One term of a shape: a number, one dimension of an input, or a run of dimensions of an input. */
struct ShapeTerm {
  enum Kind { Number, Dim, Dims } kind = Number;
  int value = 0;             // Number
  int input = 0;             // Dim, Dims
  int begin = 0, end = 0;    // Dim: begin; Dims: [begin, end), both as in a Python slice
  bool operator==(const ShapeTerm&) const = default;
};

struct ShapeRule {
  std::vector<ShapeTerm> terms;
  bool is_static() const;
  mx::Shape apply(const std::vector<mx::array>& inputs, const std::string& kernel) const;
  bool operator==(const ShapeRule&) const = default;
};

/* A given dtype, or what the dtypes of some inputs promote to. */
struct DtypeRule {
  mx::Dtype dtype = mx::float32;
  std::vector<int> inputs; // empty: `dtype`
  mx::Dtype apply(const std::vector<mx::array>& inputs, const std::string& kernel) const;
  bool operator==(const DtypeRule& other) const {
    return inputs == other.inputs && (!inputs.empty() || dtype == other.dtype);
  }
};

} // namespace accel
