/* Bound: a kernel call with its trailing inputs fixed, as fast as a Python call into mlx can be.
 *
 *     bound(x, ..., stream=None, params=None) -> array, or a tuple of arrays
 *
 * It is made once per layer and called a few hundred times per token, so it is a plain Python type with a
 * vectorcall slot (no attribute look-up, no argument tuple), and the graph node's primitive is kept as long as
 * calls use the same stream. */
#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <new>

#include "call.h"
#include "mlx/device.h"
#include "mlx/stream.h"
#include "task.h"

#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#define Py_T_PYSSIZET T_PYSSIZET
#define Py_READONLY READONLY
#endif

namespace accel {
namespace {

struct State {
  Call call;
  std::vector<mx::array> fixed;
  std::shared_ptr<mx::Primitive> primitive; // for `stream` and the call's own parameters
  mx::Stream stream;
  // The usual rule, "input 0 with last dimension N", needs no interpretation.
  int last = -1;
  PyTypeObject* array_type;
  bool several = false; // returns a tuple
};

struct BoundObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  State* state;
};

PyTypeObject* bound_type = nullptr;

std::shared_ptr<mx::Primitive> primitive_for(State& s, const mx::Stream& stream) {
  if (!s.primitive || !(s.stream == stream)) {
    s.primitive = std::make_shared<KernelPrimitive>(stream, s.call.spec, s.call.params);
    s.stream = stream;
  }
  return s.primitive;
}

PyObject* as_tuple(std::vector<mx::array> arrays) {
  nb::object tuple = nb::steal(PyTuple_New(Py_ssize_t(arrays.size())));
  if (!tuple.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < arrays.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), Py_ssize_t(i), nb::cast(std::move(arrays[i])).release().ptr());
  }
  return tuple.release().ptr();
}

PyObject* node(State& s, std::vector<mx::array> inputs, std::shared_ptr<mx::Primitive> primitive) {
  const Spec& spec = *s.call.spec;
  if (s.several || !spec.donors.empty()) {
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    shapes.reserve(spec.shapes.size());
    dtypes.reserve(spec.shapes.size());
    spec.describe(inputs, shapes, dtypes);
    auto outputs = mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
    return s.several ? as_tuple(std::move(outputs)) : nb::cast(std::move(outputs[0])).release().ptr();
  }
  mx::Shape shape;
  if (s.last >= 0 && inputs[0].ndim() > 0) {
    shape = inputs[0].shape();
    shape.back() = s.last;
  } else {
    shape = spec.shapes[0].apply(inputs, spec.name);
  }
  const mx::Dtype dtype = spec.dtypes[0].apply(inputs, spec.name);
  return nb::cast(mx::array(std::move(shape), dtype, std::move(primitive), std::move(inputs))).release().ptr();
}

PyObject* call_general(State& s, PyObject* const* args, size_t nargs, PyObject* kwnames) {
  const std::string& name = s.call.spec->name;
  PyObject *stream_arg = Py_None, *params_arg = Py_None;
  for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); ++k) {
    PyObject* key = PyTuple_GET_ITEM(kwnames, k);
    if (PyUnicode_CompareWithASCIIString(key, "stream") == 0) {
      stream_arg = args[nargs + k];
    } else if (PyUnicode_CompareWithASCIIString(key, "params") == 0) {
      params_arg = args[nargs + k];
    } else {
      throw nb::type_error(("[" + name + "] unknown keyword " + nb::cast<std::string>(nb::borrow<nb::str>(key)) +
                            "; a bound kernel takes arrays, stream= and params=")
                               .c_str());
    }
  }
  std::vector<mx::array> inputs;
  inputs.reserve(nargs + s.fixed.size());
  for (size_t i = 0; i < nargs; ++i) {
    if (nb::isinstance<mx::array>(args[i])) {
      inputs.push_back(*nb::inst_ptr<mx::array>(args[i]));
    } else if (i > 0 && i + 1 == nargs && stream_arg == Py_None) {
      stream_arg = args[i];
    } else {
      throw nb::type_error(("[" + name + "] argument " + std::to_string(i) + " is not an mx.array").c_str());
    }
  }
  if (inputs.empty()) throw nb::type_error(("[" + name + "] a bound kernel takes at least one array").c_str());
  inputs.insert(inputs.end(), s.fixed.begin(), s.fixed.end());
  mx::StreamOrDevice wanted;
  if (stream_arg != Py_None && !nb::try_cast(nb::handle(stream_arg), wanted)) {
    throw nb::type_error(("[" + name + "] stream must be a stream, a device or None").c_str());
  }
  const mx::Stream stream = cpu_stream(name, wanted);
  if (params_arg == Py_None) return node(s, std::move(inputs), primitive_for(s, stream));
  auto own = std::make_shared<KernelPrimitive>(stream, s.call.spec, make_params(params_arg));
  return node(s, std::move(inputs), std::move(own));
}

PyObject* bound_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  State& s = *reinterpret_cast<BoundObject*>(self)->state;
  const size_t nargs = PyVectorcall_NARGS(nargsf);
  try {
    if (pending_errors.load(std::memory_order_acquire)) raise_errors();
    if (nargs == 1 && !kwnames && Py_TYPE(args[0]) == s.array_type) {
      std::vector<mx::array> inputs;
      inputs.reserve(1 + s.fixed.size());
      inputs.push_back(*nb::inst_ptr<mx::array>(args[0]));
      inputs.insert(inputs.end(), s.fixed.begin(), s.fixed.end());
      return node(s, std::move(inputs), primitive_for(s, mx::default_stream(mx::Device(mx::Device::cpu))));
    }
    return call_general(s, args, nargs, kwnames);
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const nb::builtin_exception& e) {
    PyErr_SetString(e.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_ValueError, e.what());
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

void bound_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<BoundObject*>(self)->state;
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* bound_repr(PyObject* self) {
  const State& s = *reinterpret_cast<BoundObject*>(self)->state;
  return PyUnicode_FromFormat("<bound CPU kernel %s, %zd fixed inputs>", s.call.spec->name.c_str(),
                              Py_ssize_t(s.fixed.size()));
}

PyObject* bound_name(PyObject* self, void*) {
  return PyUnicode_FromString(reinterpret_cast<BoundObject*>(self)->state->call.spec->name.c_str());
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(BoundObject, vectorcall), Py_READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef getters[] = {{"__name__", bound_name, nullptr, "Name of the kernel.", nullptr},
                         {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("bound(x, ..., stream=None, params=None) -> array or tuple\n\n"
                                  "A kernel call with its trailing inputs fixed.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(bound_dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(bound_repr)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {Py_tp_getset, getters},
    {0, nullptr}};
PyType_Spec spec = {"backend_core._native.Bound", sizeof(BoundObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

} // namespace

nb::object make_bound(const Call& call, std::vector<mx::array> fixed, bool several) {
  const Spec& s = *call.spec;
  if (s.shapes.size() != 1 && !several) {
    throw nb::value_error(("[" + s.name + "] only a call with one output is bound without several=True").c_str());
  }
  auto state = std::make_unique<State>(
      State{call, std::move(fixed), nullptr, mx::Stream(-1, mx::Device(mx::Device::cpu)), -1,
            reinterpret_cast<PyTypeObject*>(nb::type<mx::array>().ptr()), several});
  const auto& terms = s.shapes[0].terms;
  if (terms.size() == 2 && terms[0] == ShapeTerm{ShapeTerm::Dims, 0, 0, 0, -1} &&
      terms[1].kind == ShapeTerm::Number) {
    state->last = terms[1].value;
  }
  auto* object = PyObject_New(BoundObject, bound_type); // takes a reference to the type
  if (!object) throw nb::python_error();
  object->vectorcall = bound_call;
  object->state = state.release();
  return nb::steal(reinterpret_cast<PyObject*>(object));
}

const Call* bound_call_of(nb::handle object, const std::vector<mx::array>** fixed) {
  if (Py_TYPE(object.ptr()) != bound_type) return nullptr;
  const State& s = *reinterpret_cast<BoundObject*>(object.ptr())->state;
  *fixed = &s.fixed;
  return &s.call;
}

void register_bound(nb::module_& m) {
  bound_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (!bound_type) throw nb::python_error();
  m.attr("Bound") = nb::handle(reinterpret_cast<PyObject*>(bound_type));
}

} // namespace accel
