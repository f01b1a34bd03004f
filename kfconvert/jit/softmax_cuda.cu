// The softmax of this package as a source to compile and to begin from:
//
//     module = kfconvert.get_cuda_compiler().compile_from_file("softmax_cuda.cu", "my_softmax")
//     y = module.forward(x)                  // softmax over the last dimension
//     grad_x = module.backward(grad_y, y)    // y * (grad_y - sum(grad_y * y))
//
// x, y, grad_y: one shape, float64, float32, float16 or bfloat16, on one GPU. The kernels are those of
// csrc/cuda/softmax.cu; here they become two operators, torch.ops.my_softmax.forward and backward, and a Python module
// that holds them. Neither has an autograd formula: kfconvert.kernels.SoftMaxOp(module) calls them as they are.

// torch's flags for extensions hide these of half types, which the kernels use.
#undef __CUDA_NO_HALF_OPERATORS__
#undef __CUDA_NO_HALF_CONVERSIONS__
#undef __CUDA_NO_HALF2_OPERATORS__
#undef __CUDA_NO_BFLOAT16_CONVERSIONS__

#include <Python.h>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>

#include "../csrc/common/softmax.h"
#include "../csrc/cuda/softmax.cu"

namespace {

using torch::stable::Tensor;

// What the host side of the operator, csrc/common/softmax.h, asks of a device.
struct Cuda {
  static void softmax(const kfc::Softmax& arguments, const Tensor& like) {
    const int32_t device = like.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;  // not the default one: torch may be recording, or running several streams
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const auto error = static_cast<cudaError_t>(kfc::launch_softmax(arguments, stream));
    KFC_CHECK(error == cudaSuccess, "softmax", cudaGetErrorString(error));
  }
};

Tensor forward(const Tensor& x) { return kfc::softmax<Cuda>(x, std::nullopt, 1.0); }

Tensor backward(const Tensor& grad, const Tensor& output) {
  return kfc::softmax_backward<Cuda>(grad, output, std::nullopt, 1.0);
}

}  // namespace

// Once more, because the macro of torch 2.11 takes the name as it is written.
#define LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)

LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def("forward(Tensor x) -> Tensor");
  m.def("backward(Tensor grad, Tensor output) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}

#define TEXT_OF(name) #name
#define NAME_OF(name) TEXT_OF(name)
#define INIT_OF(name) PyInit_##name
#define INIT(name)    INIT_OF(name)

// The operators are registered while the library is loaded, so that they are there by now.
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef definition{PyModuleDef_HEAD_INIT, NAME_OF(TORCH_EXTENSION_NAME)};
  PyObject* module = PyModule_Create(&definition);
  PyObject* torch = PyImport_ImportModule("torch");
  PyObject* ops = torch ? PyObject_GetAttrString(torch, "ops") : nullptr;
  PyObject* own = ops ? PyObject_GetAttrString(ops, NAME_OF(TORCH_EXTENSION_NAME)) : nullptr;
  for (const char* name : {"forward", "backward"}) {
    PyObject* packet = own ? PyObject_GetAttrString(own, name) : nullptr;
    if (!packet || PyModule_AddObject(module, name, packet) < 0) return nullptr;
  }
  Py_XDECREF(own);
  Py_XDECREF(ops);
  Py_XDECREF(torch);
  return module;
}
