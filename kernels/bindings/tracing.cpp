/* What mlx is recording at the moment.
 *
 * libmlx keeps its tracing state to itself, but two exported functions depend on it, so that it can be seen
 * from outside:
 *   - array::is_tracer() of an array marked as a tracer is true exactly while a trace is recorded (or a graph
 *     is to be retained for export);
 *   - broadcast_arrays() makes nodes with all arrays as inputs while a shapeless trace is recorded, and nodes
 *     with one input otherwise. */
#include "call.h"
#include "mlx/ops.h"
#include "mlx/stream.h"

using namespace nanobind::literals;

namespace accel {
namespace {

/* A constant that takes part in every trace; never destroyed, since threads may ask until the very end. */
const mx::array& marked() {
  static const mx::array* a = [] {
    auto* fresh = new mx::array({0.0f}, mx::Shape{1, 1});
    fresh->set_tracer(true);
    return fresh;
  }();
  return *a;
}

bool tracing() { return marked().is_tracer(); }

bool shapeless() {
  if (!tracing()) return false;
  static const mx::array* taller = new mx::array({0.0f, 0.0f}, mx::Shape{2, 1});
  const mx::Stream stream = mx::default_stream(mx::Device(mx::Device::cpu));
  const std::vector<mx::array> out = mx::broadcast_arrays({marked(), *taller}, stream);
  return out[0].has_primitive() && out[0].inputs().size() > 1;
}

} // namespace

void register_tracing(nb::module_& m) {
  m.def(
      "in_tracing", [](const mx::array* a) { return a ? a->is_tracer() : tracing(); }, "array"_a = nb::none(),
      "True while mlx records a graph (mx.compile, mx.grad, mx.vjp, mx.jvp, mx.vmap, mx.export_function) on this "
      "thread; with an array, True if that array is part of what is being recorded.");
  m.def("in_dynamic_tracing", &shapeless,
        "True while mlx records a graph whose shapes may differ at replay (shapeless compile or export).");
  m.def(
      "same_array", [](const mx::array& a, const mx::array& b) { return a.id() == b.id(); }, "a"_a, "b"_a,
      "True if two Python objects stand for one array. mx.compile puts new objects for the arrays it captured "
      "back into their containers.");
}

} // namespace accel
