/* Python classes Kernel and Call. */
#include <nanobind/nanobind.h>

#include <algorithm>
#include <limits>

#include "call.h"
#include "mlx/stream.h"
#include "task.h"

using namespace nanobind::literals;

namespace accel {
namespace {

int as_int(nb::handle value, const char* what) {
  long long v = 0;
  int overflow = 0;
  if (PyLong_Check(value.ptr())) v = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (!PyLong_Check(value.ptr())) throw nb::type_error((std::string(what) + " must be an integer").c_str());
  if (overflow || v > std::numeric_limits<int>::max() || v < std::numeric_limits<int>::min()) {
    throw nb::value_error((std::string(what) + " does not fit in 32 bits").c_str());
  }
  return int(v);
}

/* A shape is a sequence of terms: an int, ("dim", input, d) or ("dims", input, begin, end). */
ShapeRule make_shape(nb::handle rule) {
  ShapeRule shape;
  for (nb::handle term : rule) {
    ShapeTerm t;
    if (!nb::isinstance<nb::tuple>(term)) {
      t.value = as_int(term, "a dimension of an output shape");
      if (t.value < 0) throw nb::value_error("a dimension of an output shape is negative");
    } else {
      nb::tuple parts = nb::borrow<nb::tuple>(term);
      const std::string kind = parts.size() ? nb::cast<std::string>(parts[0]) : "";
      if (kind == "dim" && parts.size() == 3) {
        t.kind = ShapeTerm::Dim;
      } else if (kind == "dims" && parts.size() == 4) {
        t.kind = ShapeTerm::Dims;
        t.end = as_int(parts[3], "a shape rule's end");
      } else {
        throw nb::value_error("a term of an output shape is an int, (\"dim\", input, d) or (\"dims\", input, begin, end)");
      }
      t.input = as_int(parts[1], "a shape rule's input");
      t.begin = as_int(parts[2], "a shape rule's dimension");
    }
    shape.terms.push_back(t);
  }
  return shape;
}

/* A dtype is an mx.Dtype, or a tuple of inputs whose dtypes are promoted. */
DtypeRule make_dtype(nb::handle rule) {
  DtypeRule dtype;
  if (nb::isinstance<nb::tuple>(rule)) {
    for (nb::handle input : rule) dtype.inputs.push_back(as_int(input, "a dtype rule's input"));
    if (dtype.inputs.empty()) throw nb::value_error("a dtype rule names no input");
  } else if (!nb::try_cast(rule, dtype.dtype)) {
    throw nb::type_error("an output dtype must be an mx.Dtype or a tuple of input numbers");
  }
  return dtype;
}

/* A dict output -> input, as the donors of all outputs. */
std::vector<int> make_donors(nb::handle donate, size_t outputs, const std::string& name) {
  std::vector<int> donors;
  if (donate.is_none()) return donors;
  for (auto [output, input] : nb::cast<nb::dict>(donate)) {
    const int o = as_int(output, "a donation's output"), i = as_int(input, "a donation's input");
    if (o < 0 || o >= int(outputs)) {
      throw nb::value_error(("[" + name + "] there is no output " + std::to_string(o) + " to donate to").c_str());
    }
    if (i < 0) throw nb::value_error("a donation's input is negative");
    if (std::find(donors.begin(), donors.end(), i) != donors.end()) {
      throw nb::value_error("an input can be donated to one output only");
    }
    donors.resize(outputs, -1);
    donors[o] = i;
  }
  return donors;
}

std::string default_name(const Kernel& kernel, nb::handle name) {
  return name.is_none() ? kernel.symbol : nb::cast<std::string>(name);
}

} // namespace

std::shared_ptr<const Params> make_params(nb::handle values) {
  auto params = std::make_shared<Params>();
  if (values.is_none()) return params;
  for (nb::handle value : values) {
    accel_param p;
    PyObject* v = value.ptr();
    if (PyFloat_Check(v)) {
      p.f = PyFloat_AS_DOUBLE(v);
    } else if (nb::object index = nb::steal(PyNumber_Index(v)); index.is_valid()) {
      p.i = PyLong_AsLongLong(index.ptr());
      if (p.i == -1 && PyErr_Occurred()) throw nb::python_error();
    } else {
      PyErr_Clear();
      throw nb::type_error("a kernel parameter must be an int or a float");
    }
    params->push_back(p);
  }
  return params;
}

mx::Stream cpu_stream(const std::string& kernel, mx::StreamOrDevice wanted) {
  const mx::Device cpu(mx::Device::cpu);
  if (std::holds_alternative<std::monostate>(wanted)) return mx::default_stream(cpu);
  const mx::Stream stream = mx::to_stream(wanted);
  if (stream.device.type != mx::Device::cpu) {
    throw std::invalid_argument("[" + kernel + "] this is a CPU kernel; it cannot run on a GPU stream");
  }
  return stream;
}

std::vector<mx::array> Call::run(std::vector<mx::array> inputs, mx::Stream stream,
                                 std::shared_ptr<const Params> own) const {
  if (pending_errors.load(std::memory_order_acquire)) raise_errors();
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  spec->describe(inputs, shapes, dtypes);
  auto primitive = std::make_shared<KernelPrimitive>(stream, spec, own ? std::move(own) : params);
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

void register_kernels(nb::module_& m) {
  nb::class_<Kernel>(m, "Kernel", "One kernel function of a shared library.")
      .def(nb::init<std::string, std::string>(), "path"_a, "symbol"_a)
      .def_prop_ro("path", [](const Kernel& k) { return k.path; })
      .def_prop_ro("symbol", [](const Kernel& k) { return k.symbol; })
      .def_prop_ro("abi_version", [](const Kernel& k) { return k.abi_version; })
      .def("__repr__", [](const Kernel& k) { return "Kernel('" + k.path + "', '" + k.symbol + "')"; });

  nb::class_<Call>(m, "Call", "A kernel with the description of its outputs and its parameters.")
      .def(
          "__init__",
          [](Call* self, const Kernel& kernel, nb::object name, nb::object output_shapes,
             nb::object output_dtypes, nb::object params, bool ensure_row_contiguous, nb::object vjp, nb::object donate) {
            release_retired();
            auto spec = std::make_shared<Spec>();
            spec->name = default_name(kernel, name);
            // A copy: a shared_ptr made from a Python object takes the GIL when its last owner, a stream's thread,
            // lets go, and a thread that asks for the GIL while Python shuts down is killed.
            spec->kernel = std::make_shared<const Kernel>(kernel);
            for (nb::handle shape : output_shapes) spec->shapes.push_back(make_shape(shape));
            for (nb::handle dtype : output_dtypes) spec->dtypes.push_back(make_dtype(dtype));
            if (spec->shapes.empty() || spec->shapes.size() != spec->dtypes.size()) {
              throw nb::value_error(("[" + spec->name + "] " + std::to_string(spec->shapes.size()) +
                                     " output shapes and " + std::to_string(spec->dtypes.size()) +
                                     " output dtypes: a kernel needs one of each per output")
                                        .c_str());
            }
            spec->ensure_row_contiguous = ensure_row_contiguous;
            spec->donors = make_donors(donate, spec->shapes.size(), spec->name);
            spec->gradient = make_gradient(std::move(vjp), spec->name);
            new (self) Call{std::move(spec), make_params(params)};
          },
          "kernel"_a, "name"_a = nb::none(), nb::kw_only(), "output_shapes"_a, "output_dtypes"_a,
          "params"_a = nb::none(), "ensure_row_contiguous"_a = true, "vjp"_a = nb::none(),
          "donate"_a = nb::none())
      .def(
          "__call__",
          [](const Call& self, std::vector<mx::array> inputs, mx::StreamOrDevice stream, nb::object params) {
            auto own = params.is_none() ? nullptr : make_params(params);
            return self.run(std::move(inputs), cpu_stream(self.spec->name, stream), std::move(own));
          },
          "inputs"_a, "stream"_a = nb::none(), nb::kw_only(), "params"_a = nb::none())
      .def(
          "bind",
          [](const Call& self, std::vector<mx::array> fixed, bool several) {
            return make_bound(self, std::move(fixed), several);
          },
          "fixed_inputs"_a, "several"_a = false)
      .def_prop_ro("name", [](const Call& self) { return self.spec->name; });
}

} // namespace accel
