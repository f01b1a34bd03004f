// fingerprint(address, bytes) -> int: 64 bits that differ when bytes in host memory do, wherever the change is. Words
// are mixed into four lanes by the step of a multiply-and-rotate hash (as of MurmurHash3's body), so that it runs at
// about the speed of memory. The number is no defence against somebody who looks for collisions.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>

namespace kfconvert::fingerprint {

inline std::uint64_t mixed(std::uint64_t lane, std::uint64_t word) {
  word *= 0x87C37B91114253D5ull;
  word = (word << 31) | (word >> 33);
  lane ^= word * 0x4CF5AD432745937Full;
  lane = (lane << 27) | (lane >> 37);
  return lane * 5 + 0x52DCE729;
}

inline std::uint64_t of(const unsigned char* bytes, std::size_t count) {
  std::uint64_t lanes[4] = {count, 1, 2, 3};
  std::size_t i = 0;
  for (; i + sizeof(lanes) <= count; i += sizeof(lanes)) {
    std::uint64_t words[4];
    std::memcpy(words, bytes + i, sizeof(words));
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = mixed(lanes[lane], words[lane]);
  }
  for (int lane = 0; i < count; i += sizeof(std::uint64_t), ++lane) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, count - i < sizeof(word) ? count - i : sizeof(word));
    lanes[lane] = mixed(lanes[lane], word);
  }
  std::uint64_t result = 0;
  for (const std::uint64_t lane : lanes) result = mixed(result, lane);
  return result;
}

inline PyObject* fingerprint(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (given != 2) {
    PyErr_Format(PyExc_TypeError, "fingerprint() takes 2 arguments, got %zd", given);
    return nullptr;
  }
  void* const address = PyLong_AsVoidPtr(arguments[0]);
  if (address == nullptr && PyErr_Occurred()) return nullptr;
  const std::size_t count = PyLong_AsSize_t(arguments[1]);
  if (count == static_cast<std::size_t>(-1) && PyErr_Occurred()) return nullptr;
  std::uint64_t result;
  Py_BEGIN_ALLOW_THREADS;
  result = of(static_cast<const unsigned char*>(address), count);
  Py_END_ALLOW_THREADS;
  return PyLong_FromUnsignedLongLong(result);
}

// Adds the function to `module`; -1 with an exception set on failure.
inline int add_to(PyObject* module) {
  static PyMethodDef functions[] = {
      {"fingerprint", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(fingerprint)), METH_FASTCALL,
       "fingerprint(address, bytes): see kfconvert.runtime.state.fingerprint"},
      {nullptr, nullptr, 0, nullptr}};
  return PyModule_AddFunctions(module, functions);
}

}  // namespace kfconvert::fingerprint
