/* A program: several kernel calls in one primitive, one after the other, results of earlier ones feeding later ones.
 *
 * What lies between the calls never becomes an array of mlx's graph: it costs no node, no scheduling and no queueing.
 * The calls are those that bound kernels (bound.cpp) would make on their own, with the same arrays, so that the bits
 * are the same. */
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "primitive.h"

namespace accel {

/* Ways of looking at the last dimensions of an array. */
struct View {
  enum Kind { Split, Swap, Merge } kind;
  int parts = 0; // Split: the last dimension n becomes (parts, n / parts)
  // Swap exchanges dimensions 1 and 2, Merge makes the last two dimensions one.
  bool operator==(const View&) const = default;
};

/* Where an array comes from: an input of the program (step -1) or an output of an earlier step. */
struct Source {
  int step = -1, index = 0;
  std::vector<View> views;
  bool operator==(const Source&) const = default;
};

struct Step {
  std::shared_ptr<const Spec> spec;
  std::shared_ptr<const Params> params; // null: those of the program's call
  std::vector<Source> sources;
  int fixed_begin = 0, fixed_end = 0; // which of the program's fixed inputs follow
};

struct ProgramSpec {
  std::string name;
  int n_inputs = 0; // without the fixed ones
  std::vector<Step> steps;
  std::vector<Source> outputs;
};

/* Shapes and dtypes of everything in a program for given inputs. */
struct Layout {
  std::vector<std::vector<mx::Shape>> shapes; // by step and output
  std::vector<std::vector<mx::Dtype>> dtypes;
  std::vector<mx::Shape> output_shapes;
  std::vector<mx::Dtype> output_dtypes;
};

std::shared_ptr<const Layout> make_layout(const ProgramSpec& program, const std::vector<mx::array>& inputs);

class ProgramPrimitive : public mx::Primitive {
 public:
  ProgramPrimitive(mx::Stream stream, std::shared_ptr<const ProgramSpec> program, std::shared_ptr<const Layout> layout,
                   std::shared_ptr<const Params> params)
      : Primitive(stream), program_(std::move(program)), layout_(std::move(layout)), params_(std::move(params)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return program_->name.c_str(); }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 private:
  std::shared_ptr<const ProgramSpec> program_;
  std::shared_ptr<const Layout> layout_;
  std::shared_ptr<const Params> params_;
};

} // namespace accel
