#include "rules.h"

#include <algorithm>
#include <stdexcept>

#include "mlx/dtype.h"

namespace accel {
namespace {

const mx::array& pick(const std::vector<mx::array>& inputs, int i, const std::string& kernel) {
  if (i < 0 || i >= int(inputs.size())) {
    throw std::invalid_argument("[" + kernel + "] the output is described by input " + std::to_string(i) +
                                ", but there are " + std::to_string(inputs.size()) + " inputs");
  }
  return inputs[i];
}

} // namespace

bool ShapeRule::is_static() const {
  return std::all_of(terms.begin(), terms.end(), [](const ShapeTerm& t) { return t.kind == ShapeTerm::Number; });
}

mx::Shape ShapeRule::apply(const std::vector<mx::array>& inputs, const std::string& kernel) const {
  mx::Shape shape;
  for (const ShapeTerm& t : terms) {
    if (t.kind == ShapeTerm::Number) {
      shape.push_back(t.value);
      continue;
    }
    const mx::Shape& from = pick(inputs, t.input, kernel).shape();
    const int ndim = int(from.size());
    if (t.kind == ShapeTerm::Dim) {
      const int d = t.begin < 0 ? t.begin + ndim : t.begin;
      if (d < 0 || d >= ndim) {
        throw std::invalid_argument("[" + kernel + "] the output needs dimension " + std::to_string(t.begin) +
                                    " of input " + std::to_string(t.input) + ", which has " +
                                    std::to_string(ndim) + " dimensions");
      }
      shape.push_back(from[d]);
      continue;
    }
    if (t.end < 0 && ndim + t.end < 0) {
      throw std::invalid_argument("[" + kernel + "] input " + std::to_string(t.input) + " needs at least " +
                                  std::to_string(-t.end) + " dimensions, it has " + std::to_string(ndim));
    }
    const int begin = std::clamp(t.begin < 0 ? t.begin + ndim : t.begin, 0, ndim);
    const int end = std::clamp(t.end < 0 ? t.end + ndim : t.end, 0, ndim);
    for (int d = begin; d < end; ++d) shape.push_back(from[d]);
  }
  return shape;
}

mx::Dtype DtypeRule::apply(const std::vector<mx::array>& arrays, const std::string& kernel) const {
  if (inputs.empty()) return dtype;
  mx::Dtype result = pick(arrays, inputs[0], kernel).dtype();
  for (size_t i = 1; i < inputs.size(); ++i) {
    result = mx::promote_types(result, pick(arrays, inputs[i], kernel).dtype());
  }
  return result;
}

} // namespace accel
