/* Calls and bound calls: from Python arguments to graph nodes. */
#pragma once

#include <nanobind/nanobind.h>
// All type casters, here for all files: files that see different casters of one type break the one definition
// rule, and the conversion fails at run time.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <vector>

#include "mlx/utils.h"
#include "primitive.h"

namespace accel {

namespace nb = nanobind;

/* A kernel with the description of its outputs and its default parameters. */
struct Call {
  std::shared_ptr<const Spec> spec;
  std::shared_ptr<const Params> params;

  std::vector<mx::array> run(std::vector<mx::array> inputs, mx::Stream stream,
                             std::shared_ptr<const Params> own) const;
};

/* Integers and floats to parameter slots. Raises TypeError. */
std::shared_ptr<const Params> make_params(nb::handle values);

/* None: mlx's default stream of the CPU. Raises ValueError for a stream of another device. */
mx::Stream cpu_stream(const std::string& kernel, mx::StreamOrDevice stream);

/* A Python callable vjp(primals, cotangents, argnums) -> list of arrays; null for None. */
std::shared_ptr<const Gradient> make_gradient(nb::object callable, std::string kernel);

/* Drops Python objects whose last C++ owner went away on a thread without the GIL. Needs the GIL. */
void release_retired();

/* A callable of arrays (see bound.cpp). several: it returns a tuple. */
nb::object make_bound(const Call& call, std::vector<mx::array> fixed, bool several);
/* The call and the fixed inputs of such a callable; null if the object is none. */
const Call* bound_call_of(nb::handle object, const std::vector<mx::array>** fixed);
void register_bound(nb::module_& m);

struct ProgramSpec;
struct Layout;
/* What a program is made of. Raises TypeError for another object. */
std::shared_ptr<const ProgramSpec> program_of(nb::handle object);
/* A program's layout for such inputs, of which there are as many as it takes. */
std::shared_ptr<const Layout> layout_of(nb::handle object, const std::vector<mx::array>& inputs);

void register_program(nb::module_& m);
void register_caches(nb::module_& m);
void register_at_once(nb::module_& m);
void register_kernels(nb::module_& m);
void register_reference(nb::module_& m);
void register_repeated(nb::module_& m);
void register_tracing(nb::module_& m);

} // namespace accel
