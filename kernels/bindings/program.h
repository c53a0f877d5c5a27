/* A program: several kernel calls in one primitive, one after the other, results of earlier ones feeding later ones.
 * Neighbours that do not depend on each other are one parallel loop to the thread pool.
 *
 * What lies between the calls never becomes an array of mlx's graph: it costs no node, no scheduling and no queueing,
 * and lies in the thread's temporary memory. The calls are those that bound kernels (bound.cpp) would make on their
 * own, with the same arrays, so that the bits are the same. */
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "primitive.h"

namespace accel {

/* Ways of looking at the last dimensions of an array. */
struct View {
  enum Kind { Split, Swap, Merge, Limit, Part } kind;
  int parts = 0; // Split: the last dimension n becomes (parts, n / parts). Limit: number of a parameter of the call.
                 // Part: first element of the last dimension that is seen
  int end = 0;   // Part: the one behind the last
  // Swap exchanges dimensions 1 and 2, Merge makes the last two dimensions one, Limit takes the first so many
  // of dimension 2. What depends on that dimension's length cannot be known before the program runs.
  bool operator==(const View&) const = default;
};

/* The largest fixed input of the next step that has a large one: weights, which threads may fetch while they wait. */
struct Expected {
  const void* data = nullptr;
  size_t bytes = 0;
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
  std::vector<mx::array> fixed; // the inputs that follow; they have been evaluated
  Expected next;                // of the steps that follow
  int first = 0;                // the steps from this one on do not depend on each other
};

struct ProgramSpec {
  std::string name;
  int n_inputs = 0;
  std::vector<Step> steps;
  std::vector<Source> outputs; // without Merge, Limit and Part
  Expected first;
  // `first` of the program that ran after this one the last time. Written while the program runs: a hint.
  mutable std::atomic<const void*> then_data{nullptr};
  mutable std::atomic<size_t> then_bytes{0};

  /* How many steps run as one at most. */
  static constexpr int kNeighbours = 4;

  // Filled in by prepare(), once steps and outputs are there, as is what steps know of their neighbours.
  std::vector<int> uses;               // by input: how many steps and outputs see it
  std::vector<std::vector<int>> until; // by step and result: the last step that reads it

  void prepare();

  /* Runs of this program that are queued, so that one can wait for them. */
  struct Queue {
    std::mutex mutex;
    std::condition_variable less;
    int jobs = 0;
    std::chrono::steady_clock::time_point last;

    void add();
    void remove();
    /* Waits until there are none, within limits; the moment at which the last one ended. */
    std::chrono::steady_clock::time_point wait();
  };
  mutable Queue queued;

 private:
  void find_neighbours();
  void look_ahead();
};

/* The input of the program whose memory an output may have, -1 if none. */
int donor_of(const ProgramSpec& program, const Source& output);

/* One output of a step. */
struct Result {
  mx::Shape shape;
  mx::Dtype dtype;
  int output = -1;   // the program's output whose memory it has, -1 for temporary memory
  size_t offset = 0; // in temporary memory
};

class Plan;

/* What everything in a program looks like for given inputs. */
struct Layout {
  Layout();
  ~Layout();

  std::vector<mx::Shape> input_shapes;
  std::vector<mx::Dtype> input_dtypes;
  std::vector<std::vector<Result>> results; // by step
  size_t temporary = 0;                     // bytes
  std::vector<mx::Shape> output_shapes;
  std::vector<mx::Dtype> output_dtypes;

  bool fits(const std::vector<mx::array>& inputs) const;

  /* The program's calls, made by the first run that asks; null if they have to be made anew in every run. `program` is
   * the one that the layout is of. */
  const Plan* plan(const ProgramSpec& program) const;

 private:
  mutable std::once_flag planned_;
  mutable std::unique_ptr<const Plan> plan_;
};

/* Bytes of an array without gaps. */
inline size_t bytes_of(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (int d : shape) bytes *= size_t(d);
  return bytes;
}

/* Throws std::invalid_argument where inputs do not fit. */
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
  /* Whether `out` may have the memory of `in`. drained: everything that was queued before has been waited for. */
  bool may_move(const mx::array& in, const mx::array& out, long holders, bool& drained);

  std::shared_ptr<const ProgramSpec> program_;
  std::shared_ptr<const Layout> layout_;
  std::shared_ptr<const Params> params_;
};

} // namespace accel
