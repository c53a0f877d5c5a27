/* Gradients written in Python.
 *
 * The callable is owned by the Spec of a call, which graph nodes share; the last owner may go away on any
 * thread, with or without the GIL, and even after the interpreter has begun to finalise. Taking the GIL there
 * could deadlock, so such a reference is put aside and dropped at the next call that has the GIL; what is still
 * there at the end of the process is leaked. */
#include <nanobind/nanobind.h>

#include <mutex>

#include "call.h"

namespace accel {
namespace {

struct Retired {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};
Retired& retired() {
  static Retired* r = new Retired; // outlives every thread
  return *r;
}

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

class PythonGradient : public Gradient {
 public:
  PythonGradient(nb::object callable, std::string kernel)
      : callable_(callable.release().ptr()), kernel_(std::move(kernel)) {}

  ~PythonGradient() override {
    if (!finalizing() && PyGILState_Check()) {
      Py_DECREF(callable_);
      return;
    }
    Retired& r = retired();
    std::lock_guard<std::mutex> lock(r.mutex);
    r.objects.push_back(callable_);
  }

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums) const override {
    nb::gil_scoped_acquire gil;
    nb::object result = nb::borrow(callable_)(primals, cotangents, argnums);
    std::vector<mx::array> gradients;
    if (nb::isinstance<mx::array>(result)) {
      gradients.push_back(nb::cast<mx::array>(result));
    } else if (!nb::try_cast(result, gradients)) {
      throw nb::type_error(("[" + kernel_ + "] vjp must return a list of arrays").c_str());
    }
    if (gradients.size() != argnums.size()) {
      throw nb::value_error(("[" + kernel_ + "] vjp returned " + std::to_string(gradients.size()) +
                             " gradients for " + std::to_string(argnums.size()) + " argnums")
                                .c_str());
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].shape() != primals[argnums[i]].shape()) {
        throw nb::value_error(("[" + kernel_ + "] vjp returned a gradient for input " +
                               std::to_string(argnums[i]) + " that does not have the input's shape")
                                  .c_str());
      }
    }
    return gradients;
  }

  bool same(const Gradient& other) const override {
    return callable_ == static_cast<const PythonGradient&>(other).callable_;
  }

 private:
  PyObject* callable_;
  std::string kernel_;
};

} // namespace

std::shared_ptr<const Gradient> make_gradient(nb::object callable, std::string kernel) {
  if (callable.is_none()) return nullptr;
  if (!PyCallable_Check(callable.ptr())) throw nb::type_error("vjp must be callable or None");
  return std::make_shared<PythonGradient>(std::move(callable), std::move(kernel));
}

void release_retired() {
  Retired& r = retired();
  std::vector<PyObject*> objects;
  {
    std::lock_guard<std::mutex> lock(r.mutex);
    objects.swap(r.objects);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

} // namespace accel
