// kfconvert._C: how the compiled libraries were built, and the checks of every call of a converted model.
// Facts about this machine are in kfconvert/extension.py.
#include <pybind11/pybind11.h>

#include "build_facts.h"
#include "fingerprint.h"
#include "watch.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "How the compiled libraries of kfconvert were built, and the checks of every call.";
  m.def("build_info", [] {
    pybind11::dict facts;
    facts["compiler"] = KFC_COMPILER;
    facts["cuda"] = KFC_CUDA;              // version of the CUDA toolkit; empty: built without
    facts["cuda_archs"] = KFC_CUDA_ARCHS;  // e.g. "80 90": sm_80 and sm_90, with PTX of the last
    facts["torch"] = KFC_TORCH;
    facts["torch_target"] = KFC_TORCH_TARGET;  // the oldest torch that the libraries load into
    return facts;
  });
  if (kfconvert::watch::add_to(m.ptr()) != 0 || kfconvert::fingerprint::add_to(m.ptr()) != 0)
    throw pybind11::error_already_set();
}
