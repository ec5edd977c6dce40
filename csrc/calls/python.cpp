#include "calls/python.h"

#include <new>

#include "host/bindings.h"

namespace tpkernels::calls {

void set_python_error(const std::exception_ptr& error) {
  try {
    if (host::set_python_error(error)) return;
    std::rethrow_exception(error);
  } catch (pybind11::error_already_set& raised) {
    raised.restore();
  } catch (const pybind11::builtin_exception& raised) {
    raised.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& raised) {
    PyErr_SetString(PyExc_RuntimeError, raised.what());
  }
}

}  // namespace tpkernels::calls
