/* What mlx is recording at the moment.
 *
 * libmlx keeps its tracing state to itself, but two exported functions depend on it, so that it can be seen
 * from outside:
 *   - array::is_tracer() of an array marked as a tracer is true exactly while a trace is recorded (or a graph
 *     is to be retained for export);
 *   - broadcast_arrays() makes nodes with all arrays as inputs while a shapeless trace is recorded, and nodes
 *     with one input otherwise. */
#include <algorithm>
#include <cstdint>

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
 * It must not own the tree's root, which may own it: the collector does not look into native objects.
 *
 * It is asked once per token, when a token's weights have just driven everything else out of the caches. So it looks at
 * little: a dict of Python up to 3.11 has a number that no other state of any dict has had. While that of all dicts is
 * what it was when everything was looked at, only arrays need a look, which change in place. And what a check needs is
 * fetched some checks ahead, by steps from pointer to pointer. */
struct Guard {
  struct Check {
    PyObject *dict, *key, *value; // dict null: the root
    std::uintptr_t array;         // of the array that the value must hold; 0 for links
  };
  std::vector<Check> checks;
  std::vector<std::pair<PyObject*, Py_ssize_t>> sizes; // of the dicts of snapshots
  std::vector<std::pair<nb::object, std::vector<PyObject*>>> lists;
  std::vector<nb::object> owned;

  Guard(nb::list link_list, nb::list array_list, nb::list list_list) {
    for (nb::handle item : link_list) {
      nb::tuple t = nb::cast<nb::tuple>(item);
      for (nb::handle object : t) owned.push_back(nb::borrow(object));
      if (!t[0].is_none() && !PyDict_Check(t[0].ptr())) throw nb::type_error("a holder is a dict");
      checks.push_back({t[0].is_none() ? nullptr : t[0].ptr(), t[1].ptr(), t[2].ptr(), 0});
    }
    for (nb::handle item : array_list) {
      nb::tuple t = nb::cast<nb::tuple>(item);
      if (!nb::isinstance<Snapshot>(t[0])) throw nb::type_error("arrays are given as (Snapshot, module)");
      if (!PyDict_Check(t[1].ptr())) throw nb::type_error("a module is a dict");
      for (nb::handle object : t) owned.push_back(nb::borrow(object));
      const Snapshot& snapshot = *nb::inst_ptr<Snapshot>(t[0]);
      sizes.emplace_back(t[1].ptr(), snapshot.size);
      for (const auto& [name, array] : snapshot.arrays) {
        PyObject* now = PyDict_GetItemWithError(t[1].ptr(), name.ptr());
        checks.push_back({t[1].ptr(), name.ptr(), now, array.id()});
        if (now) owned.push_back(nb::borrow(now)); // only to be fetched; another one may hold the same array
      }
    }
    for (nb::handle item : list_list) {
      nb::tuple t = nb::cast<nb::tuple>(item);
      std::vector<PyObject*> objects;
      for (nb::handle object : nb::cast<nb::list>(t[1])) {
        owned.push_back(nb::borrow(object));
        objects.push_back(object.ptr());
      }
      lists.emplace_back(nb::borrow(t[0]), std::move(objects));
    }
  }

  bool holds(nb::dict root) { return (unchanged(root) || (links_hold(root) && remember(root))) && lists_hold(root); }

 private:
#if PY_VERSION_HEX < 0x030C0000
  /* The dicts, the root first, and the arrays, as they were when everything was looked at; empty before that. */
  std::vector<std::pair<const PyDictObject*, std::uint64_t>> dicts_;
  std::vector<std::pair<const mx::array*, std::uintptr_t>> arrays_;
  static constexpr size_t kAhead = 16;

  bool unchanged(nb::dict root) const {
    const size_t n = dicts_.size();
    if (!n || reinterpret_cast<PyObject*>(const_cast<PyDictObject*>(dicts_[0].first)) != root.ptr()) return false;
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&dicts_[i + kAhead].first->ma_version_tag);
      if (dicts_[i].first->ma_version_tag != dicts_[i].second) return false;
    }
    // What the dicts hold is what it was, and so alive.
    const size_t m = arrays_.size();
    for (size_t i = 0; i < m; ++i) {
      if (i + kAhead < m) __builtin_prefetch(arrays_[i + kAhead].first);
      if (arrays_[i].first->id() != arrays_[i].second) return false;
    }
    return true;
  }

  bool remember(nb::dict root) {
    dicts_.clear();
    arrays_.clear();
    std::vector<PyObject*> all;
    for (const Check& check : checks) {
      if (check.dict) all.push_back(check.dict);
      if (!check.array) continue;
      PyObject* now = PyDict_GetItemWithError(check.dict ? check.dict : root.ptr(), check.key);
      arrays_.emplace_back(nb::inst_ptr<mx::array>(now), check.array);
    }
    for (const auto& [dict, size] : sizes) all.push_back(dict);
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    all.insert(all.begin(), root.ptr());
    for (PyObject* dict : all) {
      const auto* d = reinterpret_cast<const PyDictObject*>(dict);
      dicts_.emplace_back(d, d->ma_version_tag);
    }
    return true;
  }
#else
  bool unchanged(nb::dict) const { return false; }
  bool remember(nb::dict) { return true; }
#endif

  bool links_hold(nb::dict root) const {
    constexpr size_t kFar = 24, kNear = 12;
    const size_t n = checks.size();
    for (size_t i = 0; i < n; ++i) {
      if (i + kFar < n) fetch_object(checks[i + kFar]);
      if (i + kNear < n) fetch_table(checks[i + kNear]);
      const Check& check = checks[i];
      PyObject* now = PyDict_GetItemWithError(check.dict ? check.dict : root.ptr(), check.key);
      if (!check.array) {
        if (now != check.value) return false;
      } else if (!now || !nb::isinstance<mx::array>(now) || nb::inst_ptr<mx::array>(now)->id() != check.array) {
        return false;
      }
    }
    for (const auto& [dict, size] : sizes) {
      if (PyDict_GET_SIZE(dict) != size) return false;
    }
    return true;
  }

  bool lists_hold(nb::dict root) const {
    for (const auto& [key, objects] : lists) {
      PyObject* list = PyDict_GetItemWithError(root.ptr(), key.ptr());
      if (!list || !PyList_Check(list) || PyList_GET_SIZE(list) != Py_ssize_t(objects.size())) return false;
      for (size_t i = 0; i < objects.size(); ++i) {
        if (PyList_GET_ITEM(list, Py_ssize_t(i)) != objects[i]) return false;
      }
    }
    return true;
  }

  static void fetch_object(const Check& check) {
    if (check.dict) __builtin_prefetch(check.dict);
    if (check.array) __builtin_prefetch(check.value);
  }
  static void fetch_table(const Check& check) {
    if (!check.dict) return;
    const auto* dict = reinterpret_cast<const PyDictObject*>(check.dict);
    for (int line = 0; line < 4; ++line) __builtin_prefetch(reinterpret_cast<const char*>(dict->ma_keys) + 64 * line);
    if (dict->ma_values) __builtin_prefetch(dict->ma_values);
  }
};

void register_tracing(nb::module_& m) {
  nb::class_<Snapshot>(m, "Snapshot", "The arrays of a module (a dict) at one moment.")
      .def(nb::init<nb::dict>(), "module"_a)
      .def("holds", &Snapshot::holds, "module"_a,
           "True if the dict has as many entries and the very same arrays, under whatever Python objects.")
      .def("put_back", &Snapshot::put_back, "module"_a, "Puts the arrays back under their names.");
  nb::class_<Guard>(m, "Guard", "That a tree of modules still consists of the same objects and arrays.")
      .def(nb::init<nb::list, nb::list, nb::list>(), "links"_a, "arrays"_a, "lists"_a = nb::list(),
           "links: (dict, or None for the root, key, object); arrays: (Snapshot, module); lists: (key, objects), what "
           "the root has under a key.")
      .def("holds", &Guard::holds, "root"_a, "True if every link, every snapshot and every list holds.");
  m.def(
      "in_tracing", [](const mx::array* a) { return a ? a->is_tracer() : tracing(); }, "array"_a = nb::none(),
      "True while mlx records a graph (mx.compile, mx.grad, mx.vjp, mx.jvp, mx.vmap, mx.export_function) on this "
      "thread; with an array, True if that array is part of what is being recorded.");
  m.def("in_dynamic_tracing", &shapeless,
        "True while mlx records a graph whose shapes may differ at replay (shapeless compile or export).");
}

} // namespace accel
