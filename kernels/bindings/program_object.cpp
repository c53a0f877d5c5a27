/* Program in Python: program(x, ..., params=None) -> array, or a tuple of arrays if it has several outputs.
 *
 * Like Bound (bound.cpp) a plain type with a vectorcall slot. What a program's arrays look like is worked out once per
 * shapes of its inputs. */
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include "call.h"
#include "mlx/device.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"
#include "program.h"
#include "task.h"

#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#define Py_T_PYSSIZET T_PYSSIZET
#define Py_READONLY READONLY
#endif

using namespace nanobind::literals;

namespace accel {
namespace {

struct State {
  std::shared_ptr<const ProgramSpec> program;
  std::vector<std::shared_ptr<const Layout>> known; // latest last
};

struct ProgramObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  State* state;
};

PyTypeObject* program_type = nullptr;
constexpr size_t kKnown = 16;

const std::shared_ptr<const Layout>& layout_for(State& s, const std::vector<mx::array>& inputs) {
  for (size_t i = s.known.size(); i-- > 0;) {
    if (s.known[i]->fits(inputs)) return s.known[i];
  }
  auto fresh = make_layout(*s.program, inputs);
  if (s.known.size() >= kKnown) s.known.erase(s.known.begin());
  s.known.push_back(std::move(fresh));
  return s.known.back();
}

nb::object run(State& s, PyObject* const* args, size_t nargs, PyObject* kwnames) {
  const ProgramSpec& program = *s.program;
  auto wrong = [&](const std::string& what) { return nb::type_error(("[" + program.name + "] " + what).c_str()); };
  std::shared_ptr<const Params> params;
  for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); ++k) {
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, k), "params") != 0) {
      throw wrong("a program takes arrays and params=");
    }
    params = make_params(args[nargs + k]);
  }
  if (int(nargs) != program.n_inputs) {
    throw wrong("takes " + std::to_string(program.n_inputs) + " arrays, not " + std::to_string(nargs));
  }
  std::vector<mx::array> inputs;
  inputs.reserve(nargs);
  for (size_t i = 0; i < nargs; ++i) {
    if (!nb::isinstance<mx::array>(args[i])) throw wrong("argument " + std::to_string(i) + " is not an mx.array");
    inputs.push_back(*nb::inst_ptr<mx::array>(args[i]));
  }
  std::shared_ptr<const Layout> layout = layout_for(s, inputs);
  if (!params) params = std::make_shared<const Params>();
  auto primitive = std::make_shared<ProgramPrimitive>(mx::default_stream(mx::Device(mx::Device::cpu)), s.program,
                                                      layout, std::move(params));
  if (layout->output_shapes.size() == 1) {
    return nb::cast(mx::array(layout->output_shapes[0], layout->output_dtypes[0], std::move(primitive),
                              std::move(inputs)));
  }
  auto outputs = mx::array::make_arrays(layout->output_shapes, layout->output_dtypes, primitive, inputs);
  nb::object tuple = nb::steal(PyTuple_New(Py_ssize_t(outputs.size())));
  if (!tuple.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), Py_ssize_t(i), nb::cast(std::move(outputs[i])).release().ptr());
  }
  return tuple;
}

PyObject* program_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  try {
    if (pending_errors.load(std::memory_order_acquire)) raise_errors();
    State& s = *reinterpret_cast<ProgramObject*>(self)->state;
    return run(s, args, PyVectorcall_NARGS(nargsf), kwnames).release().ptr();
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

void program_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<ProgramObject*>(self)->state;
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* program_repr(PyObject* self) {
  const State& s = *reinterpret_cast<ProgramObject*>(self)->state;
  return PyUnicode_FromFormat("<CPU program %s, %zd kernels>", s.program->name.c_str(),
                              Py_ssize_t(s.program->steps.size()));
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(ProgramObject, vectorcall), Py_READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("program(x, ..., params=None) -> array or tuple")},
                       {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)},
                       {Py_tp_repr, reinterpret_cast<void*>(program_repr)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_members, members},
                       {0, nullptr}};
PyType_Spec type_spec = {"backend_core._native.Program", sizeof(ProgramObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

/* (step, index, view, ...), step -1 for inputs; a view is ("split", parts), ("limit", parameter),
 * ("part", begin, end), "swap" or "merge". */
Source make_source(nb::handle object, const ProgramSpec& program) {
  nb::tuple parts = nb::cast<nb::tuple>(object);
  if (parts.size() < 2) throw nb::value_error("a source is (step, index, view, ...)");
  Source source;
  source.step = nb::cast<int>(parts[0]);
  source.index = nb::cast<int>(parts[1]);
  const int steps = int(program.steps.size());
  if (source.step < -1 || source.step >= steps) throw nb::value_error("a source names a later step");
  const int limit = source.step < 0 ? program.n_inputs : int(program.steps[source.step].spec->shapes.size());
  if (source.index < 0 || source.index >= limit) throw nb::value_error("a source names what is not there");
  for (size_t i = 2; i < parts.size(); ++i) {
    View view;
    if (nb::isinstance<nb::tuple>(parts[i])) {
      nb::tuple split = nb::borrow<nb::tuple>(parts[i]);
      const std::string kind = split.size() == 2 || split.size() == 3 ? nb::cast<std::string>(split[0]) : "";
      if ((kind != "split" && kind != "limit" && kind != "part") || (split.size() == 3) != (kind == "part")) {
        throw nb::value_error("unknown view");
      }
      view = {kind == "split" ? View::Split : kind == "limit" ? View::Limit : View::Part, nb::cast<int>(split[1])};
      if (kind == "part") view.end = nb::cast<int>(split[2]);
      if (view.parts < 0) throw nb::value_error("a view's number is negative");
    } else {
      const std::string kind = nb::cast<std::string>(parts[i]);
      if (kind != "swap" && kind != "merge") throw nb::value_error("unknown view");
      view = {kind == "swap" ? View::Swap : View::Merge, 0};
    }
    source.views.push_back(view);
  }
  return source;
}

nb::object make_program(std::string name, int n_inputs, nb::sequence steps, nb::sequence outputs) {
  auto program = std::make_shared<ProgramSpec>();
  program->name = std::move(name);
  program->n_inputs = n_inputs;
  std::vector<mx::array> fixed;
  for (nb::handle item : steps) {
    nb::tuple parts = nb::cast<nb::tuple>(item);
    if (parts.size() != 3) throw nb::value_error("a step is (bound kernel, sources, takes the call's params)");
    const std::vector<mx::array>* own = nullptr;
    const Call* call = bound_call_of(parts[0], &own);
    if (!call) throw nb::type_error("a program is made of bound kernels");
    Step step;
    step.spec = call->spec;
    if (!nb::cast<bool>(parts[2])) step.params = call->params;
    for (nb::handle source : nb::cast<nb::sequence>(parts[1])) step.sources.push_back(make_source(source, *program));
    step.fixed = *own;
    for (const mx::array& a : step.fixed) fixed.push_back(a);
    program->steps.push_back(std::move(step));
  }
  // They are no inputs of the graph, so nobody else would see to it that they are there.
  mx::eval(fixed);
  for (nb::handle source : outputs) {
    program->outputs.push_back(make_source(source, *program));
    for (const View& view : program->outputs.back().views) {
      if (view.kind == View::Merge || view.kind == View::Limit || view.kind == View::Part) {
        throw nb::value_error("an output cannot be merged, limited or a part");
      }
    }
  }
  if (program->steps.empty() || program->outputs.empty()) {
    throw nb::value_error("a program has at least one step and one output");
  }
  program->prepare();
  for (size_t i = 0; i < program->outputs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (program->outputs[i] == program->outputs[j]) throw nb::value_error("two outputs of a program are the same");
    }
  }
  auto state = std::make_unique<State>(State{std::move(program), {}});
  auto* object = PyObject_New(ProgramObject, program_type); // takes a reference to the type
  if (!object) throw nb::python_error();
  object->vectorcall = program_call;
  object->state = state.release();
  return nb::steal(reinterpret_cast<PyObject*>(object));
}

} // namespace

std::shared_ptr<const ProgramSpec> program_of(nb::handle object) {
  if (Py_TYPE(object.ptr()) != program_type) throw nb::type_error("not a program");
  return reinterpret_cast<ProgramObject*>(object.ptr())->state->program;
}

std::shared_ptr<const Layout> layout_of(nb::handle object, const std::vector<mx::array>& inputs) {
  return layout_for(*reinterpret_cast<ProgramObject*>(object.ptr())->state, inputs);
}

void register_program(nb::module_& m) {
  program_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&type_spec));
  if (!program_type) throw nb::python_error();
  m.attr("Program") = nb::handle(reinterpret_cast<PyObject*>(program_type));
  register_caches(m);
  register_at_once(m);
  m.def("program", &make_program, "name"_a, "n_inputs"_a, "steps"_a, "outputs"_a,
        "Several bound kernels as one primitive; see backend_core.program.");
}

} // namespace accel
