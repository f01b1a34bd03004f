// What the guard of a converted model looks at in every call, without the interpreter in between: whether dicts
// still hold the objects that they held, and whether tensors were replaced, moved or written. Plain CPython API,
// no torch headers. The same in Python, with the meaning of the arguments, are kfconvert/runtime/state/watch.py and
// kfconvert/runtime/state/derived.py.
//
// Objects are compared by address. Whoever calls keeps those that are compared with alive, so that no address can
// pass to another object. A borrowed reference is compared but never followed: looking up a key, or reading an
// attribute of a tensor subclass, may run any code, and that code may change the dicts and lists at hand.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <unordered_map>

namespace kfconvert::watch {

// Owns one reference.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  ~Owned() { Py_XDECREF(object_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  PyObject* object_;
};

inline bool is_dict(PyObject* object) {
  if (PyDict_Check(object)) return true;
  PyErr_Format(PyExc_TypeError, "expected a dict, got %.100s", Py_TYPE(object)->tp_name);
  return false;
}

inline bool takes(const char* name, Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, got %zd", name, wanted, given);
  return false;
}

// A tuple of groups of `size` items: else TypeError.
inline bool is_flat(PyObject* object, Py_ssize_t size) {
  if (PyTuple_Check(object) && PyTuple_GET_SIZE(object) % size == 0) return true;
  PyErr_Format(PyExc_TypeError, "expected a tuple of a multiple of %zd items", size);
  return false;
}

// CPython gives each dict a number that no other dict has or had, and another one whenever an item is set, replaced or
// removed (PEP 509). Python 3.13 has no such number any more; from there on, and where KFC_DICT_WATCHERS is defined, a
// watcher of dicts (PyDict_AddWatcher, from 3.12 on) keeps one here.
#if PY_VERSION_HEX >= 0x030D0000 && !defined(KFC_DICT_WATCHERS)
#define KFC_DICT_WATCHERS
#endif

#ifdef KFC_DICT_WATCHERS
class DictVersions {
 public:
  // 0 where the interpreter has no watcher left to give.
  static std::uint64_t of(PyObject* dict) {
    if (watcher() < 0) return 0;
    std::uint64_t& version = versions()[dict];
    if (version == 0) {
      if (PyDict_Watch(watcher(), dict) != 0) {
        PyErr_Clear();
        return 0;
      }
      version = ++last();
    }
    return version;
  }

 private:
  static int watcher() {
    static const int id = [] {
      const int found = PyDict_AddWatcher(&note);
      if (found < 0) PyErr_Clear();
      return found;
    }();
    return id;
  }
  static int note(PyDict_WatchEvent event, PyObject* dict, PyObject*, PyObject*) {
    if (event == PyDict_EVENT_DEALLOCATED) {
      versions().erase(dict);
    } else if (const auto found = versions().find(dict); found != versions().end()) {
      found->second = ++last();
    }
    return 0;
  }
  // The map is never destroyed, because dicts are freed, and so noted here, until the interpreter is gone.
  static std::unordered_map<PyObject*, std::uint64_t>& versions() {
    static auto& map = *new std::unordered_map<PyObject*, std::uint64_t>();
    return map;
  }
  static std::uint64_t& last() {
    static std::uint64_t number = 0;
    return number;
  }
};

inline std::uint64_t dict_version(PyObject* dict) { return DictVersions::of(dict); }
#else
inline std::uint64_t dict_version(PyObject* dict) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
}
#endif

// Entries (holder, key, expected) that follow one another in a flat tuple and have one holder.
struct Group {
  std::uint64_t start;    // index of the first entry
  std::uint64_t version;  // of the dict, when all its entries held; 0: not looked at yet
};

// watch_state((holder, key, expected, ...)) -> bytearray of groups, which first_change brings up to date
inline PyObject* watch_state(PyObject*, PyObject* entries) {
  if (!is_flat(entries, 3)) return nullptr;
  Owned state(PyByteArray_FromStringAndSize(nullptr, 0));
  if (state.get() == nullptr) return nullptr;
  Py_ssize_t groups = 0;
  const PyObject* last = nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); i += 3) {
    const PyObject* const holder = PyTuple_GET_ITEM(entries, i);
    if (i > 0 && holder == last) continue;
    last = holder;
    const Group group{static_cast<std::uint64_t>(i / 3), 0};
    if (PyByteArray_Resize(state.get(), (groups + 1) * static_cast<Py_ssize_t>(sizeof(Group))) != 0) return nullptr;
    std::memcpy(PyByteArray_AS_STRING(state.get()) + groups * sizeof(Group), &group, sizeof(Group));
    ++groups;
  }
  return state.release();
}

// What stands for a kind of entry in place of the object or the key: see kfconvert/runtime/state/watch.py.
struct Marks {
  PyObject* missing;
  PyObject* size;
  PyObject* items;
  PyObject* type;
  PyObject* code;
};

// Whether one entry holds: 1 or 0; -1 with an exception set.
inline int holds(PyObject* holder, PyObject* key, PyObject* expected, const Marks& marks) {
  if (key == marks.type) return reinterpret_cast<PyObject*>(Py_TYPE(holder)) == expected;
  if (key == marks.code) return PyFunction_Check(holder) && PyFunction_GET_CODE(holder) == expected;
  if (key == marks.items && PyDict_Check(holder)) {
    if (!PyTuple_Check(expected) || PyDict_Size(holder) != PyTuple_GET_SIZE(expected)) return 0;
    PyObject* name = nullptr;
    Py_ssize_t position = 0, index = 0;
    while (PyDict_Next(holder, &position, &name, nullptr))
      if (name != PyTuple_GET_ITEM(expected, index++)) return 0;
    return 1;
  }
  if (key == marks.items) {
    if (!PyList_Check(holder) || !PyTuple_Check(expected)) {
      PyErr_SetString(PyExc_TypeError, "expected a list and a tuple of its items");
      return -1;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(expected);
    if (PyList_GET_SIZE(holder) != count) return 0;
    for (Py_ssize_t i = 0; i < count; ++i)
      if (PyList_GET_ITEM(holder, i) != PyTuple_GET_ITEM(expected, i)) return 0;
    return 1;
  }
  if (!is_dict(holder)) return -1;
  if (key == marks.size) {
    const Py_ssize_t wanted = PyLong_AsSsize_t(expected);
    if (wanted == -1 && PyErr_Occurred()) return -1;
    return PyDict_Size(holder) == wanted;
  }
  PyObject* const found = PyDict_GetItemWithError(holder, key);
  if (found == nullptr && PyErr_Occurred()) return -1;
  return found == (expected == marks.missing ? nullptr : expected);
}

// first_change(entries, state, root, MISSING, SIZE, ITEMS, TYPE, CODE) -> index of the first entry that does not hold;
// None where all hold and no dict was written since its entries last held; -1 where all hold, but a dict was written.
// `root` is the dict that None stands for.
inline PyObject* first_change(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!takes("first_change", count, 8) || !is_flat(arguments[0], 3)) return nullptr;
  PyObject* const entries = arguments[0];
  PyObject* const state = arguments[1];
  PyObject* const root = arguments[2];
  const Marks marks{arguments[3], arguments[4], arguments[5], arguments[6], arguments[7]};
  if (!PyByteArray_Check(state)) {
    PyErr_SetString(PyExc_TypeError, "expected the state of the entries");
    return nullptr;
  }
  const Py_ssize_t end = PyTuple_GET_SIZE(entries) / 3;
  const Py_ssize_t groups = PyByteArray_GET_SIZE(state) / static_cast<Py_ssize_t>(sizeof(Group));
  bool written = false;
  for (Py_ssize_t g = 0; g < groups; ++g) {
    // Looking up a key may run any code, but the entries are a tuple of ours, and nobody else resizes the state.
    const auto group_at = [state](Py_ssize_t index) {
      Group group;
      std::memcpy(&group, PyByteArray_AS_STRING(state) + index * sizeof(Group), sizeof(Group));
      return group;
    };
    const Group group = group_at(g);
    const Py_ssize_t first = static_cast<Py_ssize_t>(group.start);
    const Py_ssize_t last = g + 1 < groups ? static_cast<Py_ssize_t>(group_at(g + 1).start) : end;
    PyObject* holder = PyTuple_GET_ITEM(entries, 3 * first);
    if (holder == Py_None) holder = root;
    const std::uint64_t version = PyDict_Check(holder) ? dict_version(holder) : 0;
    if (version != 0 && version == group.version) continue;
    for (Py_ssize_t i = first; i < last; ++i) {
      const int same = holds(holder, PyTuple_GET_ITEM(entries, 3 * i + 1), PyTuple_GET_ITEM(entries, 3 * i + 2), marks);
      if (same < 0) return nullptr;
      if (same == 0) return PyLong_FromSsize_t(i);
    }
    if (version == 0) continue;
    written = true;
    const Group seen{group.start, version};
    std::memcpy(PyByteArray_AS_STRING(state) + g * sizeof(Group), &seen, sizeof(Group));
  }
  if (written) return PyLong_FromLong(-1);
  Py_RETURN_NONE;
}

// gather((dict, key, dict, key, ...), root) -> list; `root` is the dict that None stands for
inline PyObject* gather(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!takes("gather", given, 2) || !is_flat(arguments[0], 2)) return nullptr;
  PyObject* const places = arguments[0];
  const Py_ssize_t count = PyTuple_GET_SIZE(places) / 2;
  Owned values(PyList_New(count));
  if (values.get() == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* dict = PyTuple_GET_ITEM(places, 2 * i);
    PyObject* const key = PyTuple_GET_ITEM(places, 2 * i + 1);
    if (dict == Py_None) dict = arguments[1];
    if (!is_dict(dict)) return nullptr;
    PyObject* const value = PyDict_GetItemWithError(dict, key);
    if (value == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
      return nullptr;
    }
    Py_INCREF(value);
    PyList_SET_ITEM(values.get(), i, value);
  }
  return values.release();
}

// The part of DLPack's exchange of tensors in C (major version 1) that is used here: a tensor as it lies in memory,
// without a new Python object. torch.Tensor.__dlpack_c_exchange_api__ has the table.
struct DLTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  std::uint8_t type_code, type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLPackExchange {
  std::uint32_t major, minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
};

inline const DLPackExchange* dlpack_exchange(PyObject* type) {
  Owned capsule(PyObject_GetAttrString(type, "__dlpack_c_exchange_api__"));
  const void* found = capsule.get() ? PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api") : nullptr;
  PyErr_Clear();  // torch before 2.10 has none
  const auto* const exchange = static_cast<const DLPackExchange*>(found);
  return exchange != nullptr && exchange->major == 1 ? exchange : nullptr;
}

// The descriptors behind `tensor._version`, `tensor.data_ptr()`, `tensor.stride()`, `tensor.shape`,
// `tensor.is_inference()` and `tensor.dtype`, and the types of plain tensors, looked up once.
struct TensorAttributes {
  PyObject* version;
  PyObject* data_ptr;
  PyObject* stride;
  PyObject* shape;
  PyObject* is_inference;
  PyObject* dtype;
  PyObject* tensor;
  PyObject* parameter;
  const DLPackExchange* exchange;  // may be null

  // nullptr with an exception set where torch has none.
  static const TensorAttributes* get() {
    static TensorAttributes found{};
    if (found.is_inference != nullptr) return &found;
    Owned torch(PyImport_ImportModule("torch"));
    if (torch.get() == nullptr) return nullptr;
    Owned tensor(PyObject_GetAttrString(torch.get(), "Tensor"));
    if (tensor.get() == nullptr) return nullptr;
    Owned version(PyObject_GetAttrString(tensor.get(), "_version"));
    Owned data_ptr(PyObject_GetAttrString(tensor.get(), "data_ptr"));
    Owned stride(PyObject_GetAttrString(tensor.get(), "stride"));
    Owned shape(PyObject_GetAttrString(tensor.get(), "shape"));
    Owned is_inference(PyObject_GetAttrString(tensor.get(), "is_inference"));
    if (version.get() == nullptr || data_ptr.get() == nullptr || is_inference.get() == nullptr) return nullptr;
    if (stride.get() == nullptr || shape.get() == nullptr) return nullptr;
    Owned dtype(PyObject_GetAttrString(tensor.get(), "dtype"));
    Owned nn(PyObject_GetAttrString(torch.get(), "nn"));
    Owned parameter(nn.get() ? PyObject_GetAttrString(nn.get(), "Parameter") : nullptr);
    if (dtype.get() == nullptr || parameter.get() == nullptr) return nullptr;
    if (Py_TYPE(version.get())->tp_descr_get == nullptr || Py_TYPE(dtype.get())->tp_descr_get == nullptr) {
      PyErr_SetString(PyExc_TypeError, "torch.Tensor._version or dtype is no descriptor");
      return nullptr;
    }
    const DLPackExchange* const exchange = dlpack_exchange(tensor.get());
    found = {version.release(), data_ptr.release(), stride.release(),    shape.release(), is_inference.release(),
             dtype.release(),   tensor.release(),   parameter.release(), exchange};
    return &found;
  }
};

// Steals `number`; returns false with an exception set where that is NULL or no integer.
inline bool to_bits(PyObject* number, std::uint64_t& bits) {
  Owned owned(number);
  if (number == nullptr) return false;
  bits = PyLong_AsUnsignedLongLongMask(number);
  return !(bits == static_cast<std::uint64_t>(-1) && PyErr_Occurred());
}

inline bool read_version(const TensorAttributes& attributes, PyObject* tensor, std::uint64_t& version) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  return to_bits(Py_TYPE(attributes.version)->tp_descr_get(attributes.version, tensor, type), version);
}

// A step of FNV-1a over 64 bits (http://www.isthe.com/chongo/tech/comp/fnv/), a word at a time.
inline std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) { return (hash ^ word) * 0x100000001b3ULL; }

// What `tensor.data_ptr()`, its shape, strides and dtype come to. All of them may be others after `tensor.data = ...`.
inline bool read_layout(const TensorAttributes& attributes, PyObject* tensor, std::uint64_t& layout) {
  DLTensor view{};
  if (attributes.exchange != nullptr && attributes.exchange->tensor_from_object != nullptr) {
    if (attributes.exchange->tensor_from_object(tensor, &view) == 0) {
      layout = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(view.data)) + view.byte_offset;
      layout = mixed(layout, view.type_code * 256ULL + view.type_bits);
      for (std::int32_t i = 0; i < view.ndim; ++i) {
        layout = mixed(layout, static_cast<std::uint64_t>(view.shape[i]));
        if (view.strides != nullptr) layout = mixed(layout, static_cast<std::uint64_t>(view.strides[i]));
      }
      return true;
    }
    PyErr_Clear();  // a kind of tensor that DLPack does not know
  }
  if (!to_bits(PyObject_Vectorcall(attributes.data_ptr, &tensor, 1, nullptr), layout)) return false;
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  Owned dtype(Py_TYPE(attributes.dtype)->tp_descr_get(attributes.dtype, tensor, type));
  Owned shape(Py_TYPE(attributes.shape)->tp_descr_get(attributes.shape, tensor, type));
  Owned stride(PyObject_Vectorcall(attributes.stride, &tensor, 1, nullptr));
  for (PyObject* each : {dtype.get(), shape.get(), stride.get()}) {
    const Py_hash_t hash = each == nullptr ? -1 : PyObject_Hash(each);
    if (hash == -1) return false;
    layout = mixed(layout, static_cast<std::uint64_t>(hash));
  }
  return true;
}

// What tensor_state keeps of one tensor.
struct Record {
  std::uint64_t object;   // address of the Python object
  std::uint64_t version;  // kNoVersion for an inference tensor, None, and where the version does not count
  std::uint64_t layout;   // where and how it lies in memory
};

constexpr std::uint64_t kNoVersion = static_cast<std::uint64_t>(-1);

inline std::uint64_t address(PyObject* object) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(object));
}

// tensor_state(tuple of tensors and None, number) -> bytes; the version counts for so many of the tensors
inline PyObject* tensor_state(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!takes("tensor_state", given, 2)) return nullptr;
  PyObject* const tensors = arguments[0];
  const TensorAttributes* const attributes = TensorAttributes::get();
  if (attributes == nullptr || !is_flat(tensors, 1)) return nullptr;
  const Py_ssize_t versioned = PyLong_AsSsize_t(arguments[1]);
  if (versioned == -1 && PyErr_Occurred()) return nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(tensors);
  Owned state(PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(Record))));
  if (state.get() == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, i);
    Record record{address(tensor), kNoVersion, 0};
    if (tensor != Py_None) {
      if (i < versioned) {
        Owned is_inference(PyObject_Vectorcall(attributes->is_inference, &tensor, 1, nullptr));
        if (is_inference.get() == nullptr) return nullptr;
        if (is_inference.get() != Py_True && !read_version(*attributes, tensor, record.version)) return nullptr;
      }
      if (!read_layout(*attributes, tensor, record.layout)) return nullptr;
    }
    std::memcpy(PyBytes_AS_STRING(state.get()) + i * sizeof(Record), &record, sizeof(Record));
  }
  return state.release();
}

// has_state(list or tuple of tensors and None, state of others that are still alive) -> bool
inline PyObject* has_state(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!takes("has_state", given, 2)) return nullptr;
  PyObject* const tensors = arguments[0];
  PyObject* const state = arguments[1];
  if (!(PyList_Check(tensors) || PyTuple_Check(tensors)) || !PyBytes_Check(state)) {
    PyErr_SetString(PyExc_TypeError, "expected a list or tuple of tensors and a state");
    return nullptr;
  }
  const TensorAttributes* const attributes = TensorAttributes::get();
  if (attributes == nullptr) return nullptr;
  const Py_ssize_t count = PyBytes_GET_SIZE(state) / static_cast<Py_ssize_t>(sizeof(Record));
  if (PySequence_Fast_GET_SIZE(tensors) != count) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i >= PySequence_Fast_GET_SIZE(tensors)) Py_RETURN_FALSE;  // reading the tensor before has changed the list
    Record record;
    std::memcpy(&record, PyBytes_AS_STRING(state) + i * sizeof(Record), sizeof(Record));
    PyObject* const tensor = PySequence_Fast_GET_ITEM(tensors, i);
    if (address(tensor) != record.object) Py_RETURN_FALSE;
    if (tensor == Py_None) continue;
    Py_INCREF(tensor);
    Owned held(tensor);
    std::uint64_t version = kNoVersion, layout = 0;
    if (record.version != kNoVersion && !read_version(*attributes, tensor, version)) return nullptr;
    if (version != record.version) Py_RETURN_FALSE;
    if (!read_layout(*attributes, tensor, layout)) return nullptr;
    if (layout != record.layout) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// The first position in `indices` that stands for the same object in `values` as position `place` does.
inline std::uint64_t first_same(PyObject* values, PyObject* indices, Py_ssize_t place) {
  const auto value_at = [&](Py_ssize_t i) {
    const Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(indices, i));
    return index < PyList_GET_SIZE(values) ? PyList_GET_ITEM(values, index) : nullptr;
  };
  Py_ssize_t first = 0;
  while (value_at(first) != value_at(place)) ++first;
  return static_cast<std::uint64_t>(first);
}

// tensor_key(list, tuple of indices) -> bytes that tell dtype, device and shape of the tensors at the indices, and
// which of them are the very same; None where one is no plain strided tensor, or where torch has no exchange.
inline PyObject* tensor_key(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!takes("tensor_key", given, 2) || !is_flat(arguments[1], 1)) return nullptr;
  if (!PyList_Check(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "expected a list");
    return nullptr;
  }
  const TensorAttributes* const attributes = TensorAttributes::get();
  if (attributes == nullptr) return nullptr;
  if (attributes->exchange == nullptr || attributes->exchange->tensor_from_object == nullptr) Py_RETURN_NONE;
  char key[1024];
  std::size_t used = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[1]); ++i) {
    const Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(arguments[1], i));
    if (index < 0 || index >= PyList_GET_SIZE(arguments[0])) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "there is no such argument");
      return nullptr;
    }
    PyObject* const tensor = PyList_GET_ITEM(arguments[0], index);
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != attributes->tensor && type != attributes->parameter) Py_RETURN_NONE;
    DLTensor view{};
    if (attributes->exchange->tensor_from_object(tensor, &view) != 0) {
      PyErr_Clear();  // a layout or dtype that DLPack does not know
      Py_RETURN_NONE;
    }
    // The address of torch's own dtype object, as DLPack has one name for several dtypes, such as uint4 and uint8.
    // These objects live as long as torch does.
    Owned dtype(Py_TYPE(attributes->dtype)->tp_descr_get(attributes->dtype, tensor, type));
    if (dtype.get() == nullptr) return nullptr;
    const std::uint64_t kind = address(dtype.get());
    const std::uint64_t facts[] = {kind, static_cast<std::uint64_t>(view.device_type),
                                   static_cast<std::uint64_t>(view.device_id), static_cast<std::uint64_t>(view.ndim),
                                   first_same(arguments[0], arguments[1], i)};
    const std::size_t shape = static_cast<std::size_t>(view.ndim) * sizeof(std::int64_t);
    if (used + sizeof(facts) + shape > sizeof(key)) Py_RETURN_NONE;
    std::memcpy(key + used, facts, sizeof(facts));
    if (shape > 0) std::memcpy(key + used + sizeof(facts), view.shape, shape);
    used += sizeof(facts) + shape;
  }
  return PyBytes_FromStringAndSize(key, static_cast<Py_ssize_t>(used));
}

// Adds the functions to `module`; -1 with an exception set on failure.
inline int add_to(PyObject* module) {
  static PyMethodDef functions[] = {
      {"watch_state", watch_state, METH_O, "watch_state(entries): see kfconvert.runtime.state.watch.Watch"},
      {"first_change", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(first_change)), METH_FASTCALL,
       "first_change(entries, state, root, missing, size, items, type, code): see kfconvert.runtime.state.watch"},
      {"gather", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(gather)), METH_FASTCALL,
       "gather(places, root): see kfconvert.runtime.state.watch.gather"},
      {"tensor_state", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(tensor_state)), METH_FASTCALL,
       "tensor_state(tensors, versioned): see kfconvert.runtime.state.derived"},
      {"has_state", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(has_state)), METH_FASTCALL,
       "has_state(tensors, state): see kfconvert.runtime.state.derived"},
      {"tensor_key", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(tensor_key)), METH_FASTCALL,
       "tensor_key(leaves, indices): see kfconvert.region.guard"},
      {nullptr, nullptr, 0, nullptr}};
  return PyModule_AddFunctions(module, functions);
}

}  // namespace kfconvert::watch
