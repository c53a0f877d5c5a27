/* KV caches of many layers as the inputs of one program, and its outputs put back: what Python would do with 30 objects
 * takes as long as building the graph.
 *
 * A cache is an object with attributes keys and values, arrays (batch, heads, length, width), of which the first
 * `offset` positions are filled. */
#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "call.h"
#include "program.h"

using namespace nanobind::literals;

namespace accel {
namespace {

struct Names {
  PyObject *keys, *values, *offset;
};

const Names& names() {
  static const Names n{PyUnicode_InternFromString("keys"), PyUnicode_InternFromString("values"),
                       PyUnicode_InternFromString("offset")};
  return n;
}

nb::object attribute(PyObject* object, PyObject* name) {
  nb::object value = nb::steal(PyObject_GetAttr(object, name));
  if (!value.is_valid()) throw nb::python_error();
  return value;
}

/* (offset, [keys, values, keys, ...]) if all caches are different ones of the class, at one offset, and have room for
 * one more position in arrays of that form; else None. */
nb::object take(nb::handle caches, nb::handle cls, int batch, int heads, int width, mx::Dtype dtype) {
  if (!PyList_CheckExact(caches.ptr())) return nb::none();
  const Py_ssize_t n = PyList_GET_SIZE(caches.ptr());
  auto fits = [&](nb::handle value, int length) {
    if (!nb::isinstance<mx::array>(value)) return -1;
    const mx::array& a = *nb::inst_ptr<mx::array>(value);
    if (a.ndim() != 4 || a.dtype() != dtype || a.shape(0) != batch || a.shape(1) != heads || a.shape(3) != width) {
      return -1;
    }
    return length < 0 || a.shape(2) == length ? int(a.shape(2)) : -1;
  };
  nb::object arrays = nb::steal(PyList_New(2 * n));
  if (!arrays.is_valid()) throw nb::python_error();
  std::vector<const void*> seen;
  long offset = -1;
  // A token's weights have driven them out of the caches; what an object refers to lies before it.
  for (Py_ssize_t i = 0; i < n; ++i) {
    const char* object = reinterpret_cast<const char*>(PyList_GET_ITEM(caches.ptr(), i));
    __builtin_prefetch(object);
    __builtin_prefetch(object - 32);
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    nb::object cache = nb::borrow(PyList_GET_ITEM(caches.ptr(), i));
    if (reinterpret_cast<PyObject*>(Py_TYPE(cache.ptr())) != cls.ptr()) return nb::none();
    seen.push_back(cache.ptr());
    const nb::object at = attribute(cache.ptr(), names().offset);
    if (!PyLong_CheckExact(at.ptr())) return nb::none();
    const long here = PyLong_AsLong(at.ptr());
    if (here == -1 && PyErr_Occurred()) PyErr_Clear();
    if (here < 0 || (i > 0 && here != offset)) return nb::none();
    offset = here;
    nb::object keys = attribute(cache.ptr(), names().keys), values = attribute(cache.ptr(), names().values);
    const int length = fits(keys, -1);
    if (length <= offset || fits(values, length) < 0) return nb::none();
    PyList_SET_ITEM(arrays.ptr(), 2 * i, keys.release().ptr());
    PyList_SET_ITEM(arrays.ptr(), 2 * i + 1, values.release().ptr());
  }
  // A cache that is there twice moves on twice.
  std::sort(seen.begin(), seen.end());
  if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) return nb::none();
  return nb::make_tuple(offset, arrays);
}

/* Puts keys and values, arrays[1], arrays[2], ..., and an offset into the caches from number `begin` on. */
void put(nb::list caches, Py_ssize_t begin, nb::tuple arrays, nb::int_ offset) {
  const Py_ssize_t n = (Py_ssize_t(arrays.size()) - 1) / 2;
  if (begin < 0 || begin + n > PyList_GET_SIZE(caches.ptr())) throw nb::value_error("there are not so many caches");
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* cache = PyList_GET_ITEM(caches.ptr(), begin + i);
    if (PyObject_SetAttr(cache, names().keys, PyTuple_GET_ITEM(arrays.ptr(), 1 + 2 * i)) != 0 ||
        PyObject_SetAttr(cache, names().values, PyTuple_GET_ITEM(arrays.ptr(), 2 + 2 * i)) != 0 ||
        PyObject_SetAttr(cache, names().offset, offset.ptr()) != 0) {
      throw nb::python_error();
    }
  }
}

/* Moves caches on whose arrays were changed in place. */
void move_on(nb::list caches, nb::int_ offset) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(caches.ptr()); ++i) {
    if (PyObject_SetAttr(PyList_GET_ITEM(caches.ptr(), i), names().offset, offset.ptr()) != 0) throw nb::python_error();
  }
}

} // namespace

void register_caches(nb::module_& m) {
  m.def("take_caches", &take, "caches"_a, "cls"_a, "batch"_a, "heads"_a, "width"_a, "dtype"_a,
        "(offset, [keys, values, keys, ...]) of a list of caches of one class that are all at one offset and have room "
        "for one more position; None if anything is otherwise.");
  m.def("put_caches", &put, "caches"_a, "begin"_a, "arrays"_a, "offset"_a,
        "Puts arrays[1:], as take_caches gives them, and an offset into the caches from number `begin` on.");
  m.def("move_caches", &move_on, "caches"_a, "offset"_a, "Sets the offset of caches.");
}

} // namespace accel
