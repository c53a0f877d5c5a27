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

/* The arrays of a module at one moment: whether it still holds them, and giving them back.
 *
 * Python objects do not tell: assigning to an element or `a *= 2` keeps the object and puts another array into
 * it, and mx.compile puts new objects for the same arrays back. The arrays are kept alive, so that no later array
 * can have the id of one of them. */
struct Snapshot {
  Py_ssize_t size = 0; // of the dict, arrays or not
  std::vector<std::pair<nb::object, mx::array>> arrays;

  explicit Snapshot(nb::dict module) : size(Py_ssize_t(module.size())) {
    for (auto [name, value] : module) {
      if (nb::isinstance<mx::array>(value)) arrays.emplace_back(nb::borrow(name), nb::cast<mx::array>(value));
    }
  }

  bool holds(nb::dict module) const {
    if (Py_ssize_t(module.size()) != size) return false;
    for (const auto& [name, array] : arrays) {
      PyObject* now = PyDict_GetItemWithError(module.ptr(), name.ptr());
      if (!now || !nb::isinstance<mx::array>(now) || nb::inst_ptr<mx::array>(now)->id() != array.id()) return false;
    }
    return true;
  }

  void put_back(nb::dict module) const {
    for (const auto& [name, array] : arrays) {
      if (PyDict_SetItem(module.ptr(), name.ptr(), nb::cast(array).ptr()) != 0) throw nb::python_error();
    }
  }
};

/* That a tree of modules still consists of the very same objects and arrays.
 *
 * It must not own the tree's root, which may own it: the collector does not look into native objects. */
struct Guard {
  struct Link {
    nb::object holder; // null: the root
    nb::object key, value;
  };
  std::vector<Link> links;
  std::vector<std::pair<nb::object, nb::object>> arrays; // Snapshot, module

  Guard(nb::list link_list, nb::list array_list) {
    for (nb::handle item : link_list) {
      nb::tuple t = nb::cast<nb::tuple>(item);
      nb::object holder = nb::borrow(t[0]);
      links.push_back({holder.is_none() ? nb::object() : holder, nb::borrow(t[1]), nb::borrow(t[2])});
      if (links.back().holder.is_valid() && !PyDict_Check(holder.ptr())) throw nb::type_error("a holder is a dict");
    }
    for (nb::handle item : array_list) {
      nb::tuple t = nb::cast<nb::tuple>(item);
      if (!nb::isinstance<Snapshot>(t[0])) throw nb::type_error("arrays are given as (Snapshot, module)");
      arrays.emplace_back(nb::borrow(t[0]), nb::borrow(t[1]));
    }
  }

  bool holds(nb::dict root) const {
    for (const Link& link : links) {
      PyObject* holder = link.holder.is_valid() ? link.holder.ptr() : root.ptr();
      if (PyDict_GetItemWithError(holder, link.key.ptr()) != link.value.ptr()) return false;
    }
    for (const auto& [snapshot, module] : arrays) {
      if (!nb::inst_ptr<Snapshot>(snapshot)->holds(nb::borrow<nb::dict>(module))) return false;
    }
    return true;
  }
};

void register_tracing(nb::module_& m) {
  nb::class_<Snapshot>(m, "Snapshot", "The arrays of a module (a dict) at one moment.")
      .def(nb::init<nb::dict>(), "module"_a)
      .def("holds", &Snapshot::holds, "module"_a,
           "True if the dict has as many entries and the very same arrays, under whatever Python objects.")
      .def("put_back", &Snapshot::put_back, "module"_a, "Puts the arrays back under their names.");
  nb::class_<Guard>(m, "Guard", "That a tree of modules still consists of the same objects and arrays.")
      .def(nb::init<nb::list, nb::list>(), "links"_a, "arrays"_a,
           "links: (dict, or None for the root, key, object); arrays: (Snapshot, module).")
      .def("holds", &Guard::holds, "root"_a, "True if every link and every snapshot holds.");
  m.def(
      "in_tracing", [](const mx::array* a) { return a ? a->is_tracer() : tracing(); }, "array"_a = nb::none(),
      "True while mlx records a graph (mx.compile, mx.grad, mx.vjp, mx.jvp, mx.vmap, mx.export_function) on this "
      "thread; with an array, True if that array is part of what is being recorded.");
  m.def("in_dynamic_tracing", &shapeless,
        "True while mlx records a graph whose shapes may differ at replay (shapeless compile or export).");
}

} // namespace accel
