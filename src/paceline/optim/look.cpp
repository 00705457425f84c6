// Whether all tensors of a step are as they were at the last, in one call: what members.py asks.
//
// A step of many small tensors is mostly a wait for memory: what torch knows of a tensor is spread over the
// heap, some hundred bytes here and there, and after a forward and a backward no cache has it any more. So of
// each tensor no more is read than has to be, nothing is written (not even a count of references), and where
// it was at the last look is asked for some tensors ahead, so that many of them are on their way at a time.
//
// It is built with the headers of the torch that is there, and tried out in a process of its own before
// anything here is used (look.py).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/TensorBase.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

using c10::StorageImpl;
using c10::TensorImpl;

namespace {

PyTypeObject *plain[2];  // Tensor and Parameter
Py_ssize_t within;       // where a Python tensor says which tensor it is

bool is_plain(PyObject *object) { return Py_TYPE(object) == plain[0] || Py_TYPE(object) == plain[1]; }

// The tensor behind a Python object.
TensorImpl *behind(PyObject *tensor)
{
    return *reinterpret_cast<TensorImpl **>(reinterpret_cast<char *>(tensor) + within);
}

// --- Memory that will be wanted ---------------------------------------------------------------------------

constexpr Py_ssize_t AHEAD = 8;  // tensors; there may be nothing any more: to ask for it does no harm

void fetch(const void *address, size_t bytes)
{
    auto first = reinterpret_cast<uintptr_t>(address) & ~uintptr_t{63};
    for (auto line = first; line < reinterpret_cast<uintptr_t>(address) + bytes; line += 64)
        __builtin_prefetch(reinterpret_cast<void *>(line));
}

void fetch(const StorageImpl *storage) { fetch(reinterpret_cast<const char *>(storage) + 16, 48); }

// --- What a tensor is and where it lies -------------------------------------------------------------------

struct Kind {
    uint64_t keys;  // what torch chooses functions by: device, layout, negative views, classes of one's own
    c10::ScalarType dtype;
    c10::Device device;
    std::vector<int64_t> sizes, strides;

    explicit Kind(const TensorImpl &tensor)
        : keys(tensor.key_set().raw_repr()), dtype(tensor.dtype().toScalarType()), device(tensor.device()),
          sizes(tensor.sizes().vec()), strides(tensor.strides().vec())
    {
    }

    bool is_of(const TensorImpl &tensor) const
    {
        return tensor.key_set().raw_repr() == keys && tensor.dtype().toScalarType() == dtype &&
               tensor.device() == device && tensor.sizes() == c10::IntArrayRef(sizes) &&
               tensor.strides() == c10::IntArrayRef(strides);
    }

    bool operator==(const Kind &other) const
    {
        return keys == other.keys && dtype == other.dtype && device == other.device && sizes == other.sizes &&
               strides == other.strides;
    }
};

StorageImpl *storage_of(const TensorImpl &tensor) { return tensor.unsafe_storage().unsafeGetStorageImpl(); }

int64_t address(const TensorImpl &tensor, const void *begin)
{
    if (begin == nullptr || tensor.numel() == 0) return 0;
    auto offset = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(begin)) + offset;
}

// Of what is read; and of what is written, which is no longer shared with a copy that was put off.
int64_t address_to_read(const TensorImpl &tensor)
{
    auto *storage = storage_of(tensor);
    return storage == nullptr ? 0 : address(tensor, storage->data());
}

int64_t address_to_write(const TensorImpl &tensor)
{
    auto *storage = storage_of(tensor);
    return storage == nullptr ? 0 : address(tensor, storage->mutable_data());
}

// --- What is remembered of a group ------------------------------------------------------------------------

struct Own {  // a parameter and its gradient
    int64_t at;
    const Kind *kind, *kind_of_grad;
    // For `fetch` alone, as they were at the last look.
    const TensorImpl *tensor;
    const StorageImpl *storage;
    const void *meta;
    const TensorImpl *grad;
    const StorageImpl *storage_of_grad;
};

struct Kept {  // an entry of a state; without a tensor if it is none
    TensorImpl *tensor;
    int64_t at;
    const StorageImpl *storage;  // for `fetch` alone
    const void *counter;         // likewise: of its version, if that is asked for

    // Of what says where it is, which is said at both ends of what torch knows of it.
    void fetch_place() const
    {
        if (tensor == nullptr) return;
        auto *begin = reinterpret_cast<const char *>(tensor);
        fetch(begin + 16, 32);
        fetch(begin + sizeof(TensorImpl) - 32, 32);
        fetch(storage);
        if (counter != nullptr) fetch(counter, 16);
    }
};

struct Memory {
    std::vector<Own> own;
    std::vector<Kept> kept;
    std::vector<uint64_t> versions;  // of the states, when they were last walked through
    std::vector<std::unique_ptr<Kind>> kinds;

    Memory() = default;
    Memory(const Memory &) = delete;
    // Nothing here keeps a tensor: somebody may hang an optimizer on one, and Python could not see that they keep
    // each other alive. What torch knows of an entry stays readable, and says so if it has no memory any more.
    ~Memory()
    {
        for (auto &entry : kept)
            if (entry.tensor != nullptr) c10::raw::weak_intrusive_ptr::decref(entry.tensor);
    }

    const Kind *kind_of(const TensorImpl &tensor)
    {
        Kind now(tensor);
        for (auto &kind : kinds)
            if (*kind == now) return kind.get();
        kinds.push_back(std::make_unique<Kind>(std::move(now)));
        return kinds.back().get();
    }

    bool keep_own(PyObject *parameter, PyObject *grad)
    {
        if (!is_plain(parameter) || !is_plain(grad)) return false;
        TensorImpl &tensor = *behind(parameter);
        own.push_back({address_to_write(tensor), kind_of(tensor), kind_of(*behind(grad)), nullptr, nullptr, nullptr,
                       nullptr, nullptr});
        return true;
    }

    bool keep_entry(PyObject *entry, bool watched)
    {
        if (!PyObject_TypeCheck(entry, plain[0])) {
            kept.push_back({nullptr, 0, nullptr, nullptr});
            return true;
        }
        if (!is_plain(entry)) return false;
        TensorImpl &tensor = *behind(entry);
        auto at = address_to_write(tensor);
        c10::raw::weak_intrusive_ptr::incref(&tensor);
        // What torch knows of a version is where it is counted.
        const void *counter = *reinterpret_cast<void *const *>(&tensor.version_counter());
        kept.push_back({&tensor, at, storage_of(tensor), watched ? counter : nullptr});
        return true;
    }
};

constexpr char NAME[] = "paceline.Memory";

Memory *memory_of(PyObject *capsule) { return static_cast<Memory *>(PyCapsule_GetPointer(capsule, NAME)); }

void forget(PyObject *capsule) { delete memory_of(capsule); }

// remember(parameters, grads, states, entries, watched): all lists, the last of True and False for each entry.
// None if not all tensors of them are plain.
PyObject *remember(PyObject *, PyObject *const *lists, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyList_Check(lists[i])) count = 0;
    if (count != 5 || PyList_GET_SIZE(lists[0]) != PyList_GET_SIZE(lists[1]) ||
        PyList_GET_SIZE(lists[3]) != PyList_GET_SIZE(lists[4]))
        return PyErr_Format(PyExc_TypeError, "remember takes five lists");
    try {
        auto memory = std::make_unique<Memory>();
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[0]); i++)
            if (!memory->keep_own(PyList_GET_ITEM(lists[0], i), PyList_GET_ITEM(lists[1], i))) Py_RETURN_NONE;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[3]); i++)
            if (!memory->keep_entry(PyList_GET_ITEM(lists[3], i), PyList_GET_ITEM(lists[4], i) == Py_True))
                Py_RETURN_NONE;
        memory->versions.resize(static_cast<size_t>(PyList_GET_SIZE(lists[2])));
        PyObject *capsule = PyCapsule_New(memory.get(), NAME, forget);
        if (capsule != nullptr) memory.release();
        return capsule;
    } catch (...) {  // of torch, of a tensor that has no sizes or no memory
        Py_RETURN_NONE;
    }
}

// --- Whether all is as it was -----------------------------------------------------------------------------

bool are_same(PyObject *some, PyObject *others)
{
    if (!PyList_Check(some)) return false;
    auto count = PyList_GET_SIZE(some);
    return count == PyList_GET_SIZE(others) &&
           std::memcmp(reinterpret_cast<PyListObject *>(some)->ob_item,
                       reinterpret_cast<PyListObject *>(others)->ob_item,
                       static_cast<size_t>(count) * sizeof(PyObject *)) == 0;
}

// A number that another content of a dictionary does not have; 0: not known. Python 3.14 has none.
uint64_t version_of(PyObject *dictionary)
{
#if PY_VERSION_HEX < 0x030E0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return PyDict_Check(dictionary) ? reinterpret_cast<PyDictObject *>(dictionary)->ma_version_tag : 0;
#pragma GCC diagnostic pop
#else
    (void)dictionary;
    return 0;
#endif
}

// Whether an entry is what it was; what is no tensor may be anything else that is none.
bool is_entry(const Kept &before, PyObject *entry)
{
    if (before.tensor == nullptr) return !PyObject_TypeCheck(entry, plain[0]);
    return is_plain(entry) && behind(entry) == before.tensor;
}

// Whether the states have the entries that they had.
bool have_entries(Memory &memory, PyObject *states)
{
    auto count = PyList_GET_SIZE(states);
    Py_ssize_t seen = 0, kept = static_cast<Py_ssize_t>(memory.kept.size());
    if (count != static_cast<Py_ssize_t>(memory.versions.size())) return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + AHEAD < count) fetch(PyList_GET_ITEM(states, i + AHEAD), sizeof(PyDictObject));
        PyObject *state = PyList_GET_ITEM(states, i), *key, *entry;
        auto version = version_of(state);
        auto &before = memory.versions[static_cast<size_t>(i)];
        Py_ssize_t position = 0;
        if (version != 0 && version == before) {
            seen += PyDict_GET_SIZE(state);
            continue;
        }
        while (PyDict_Next(state, &position, &key, &entry)) {
            if (seen >= kept || !is_entry(memory.kept[static_cast<size_t>(seen)], entry)) return false;
            seen++;
        }
        before = version;
    }
    return seen == kept;
}

// Whether they are where they were; and how often those that are watched were changed, all together.
bool are_there(const Memory &memory, int64_t &changes)
{
    auto count = memory.kept.size();
    changes = 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) memory.kept[i + AHEAD].fetch_place();
        auto &entry = memory.kept[i];
        if (entry.tensor == nullptr) continue;
        if (address_to_write(*entry.tensor) != entry.at) return false;
        if (entry.counter != nullptr) changes += entry.tensor->version_counter().current_version();
    }
    return true;
}

// Where the gradient of a parameter is, if both are as they were; -1 if either is not.
int64_t grad_as_before(Own &own, PyObject *parameter)
{
    TensorImpl *tensor = behind(parameter);
    if (!own.kind->is_of(*tensor) || address_to_write(*tensor) != own.at) return -1;
    own.tensor = tensor;
    const TensorImpl *grad = reinterpret_cast<const at::TensorBase &>(tensor->grad()).unsafeGetTensorImpl();
    own.storage = storage_of(*tensor);
    own.meta = tensor->autograd_meta();
    own.grad = grad;
    if (!own.kind_of_grad->is_of(*grad)) return -1;
    own.storage_of_grad = storage_of(*grad);
    auto at = address_to_read(*grad);
    return at == 0 && grad->numel() != 0 ? -1 : at;  // zeros that were never written have no address
}

bool are_idle(PyObject *parameters)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters); i++) {
        PyObject *parameter = PyList_GET_ITEM(parameters, i);
        bool there;
        if (is_plain(parameter)) {
            there = reinterpret_cast<const at::TensorBase &>(behind(parameter)->grad()).defined();
        } else {  // whose class may say otherwise
            PyObject *grad = PyObject_GetAttrString(parameter, "grad");
            there = grad != Py_None;
            Py_XDECREF(grad);
        }
        if (there) return false;
    }
    return true;
}

// The answer of `again`; NULL, without an exception or with one, if anything is not as it was.
PyObject *look(Memory &memory, PyObject *const *lists, int64_t *addresses)
{
    PyObject *params = lists[0], *params_before = lists[1], *parameters = lists[2], *idle = lists[3];
    PyObject *states = lists[4];
    auto count = memory.own.size();
    int64_t changes;
    if (PyList_GET_SIZE(parameters) != static_cast<Py_ssize_t>(count) || !are_same(params, params_before) ||
        !have_entries(memory, states) || !are_there(memory, changes) || !are_idle(idle))
        return nullptr;
    bool moved = false;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            auto &later = memory.own[i + AHEAD];
            fetch(PyList_GET_ITEM(parameters, static_cast<Py_ssize_t>(i) + AHEAD), sizeof(PyObject) + 16);
            fetch(later.tensor, sizeof(TensorImpl));
            fetch(later.storage);
            fetch(later.meta, 16);
            fetch(later.grad, sizeof(TensorImpl));
            fetch(later.storage_of_grad);
        }
        auto at = grad_as_before(memory.own[i], PyList_GET_ITEM(parameters, static_cast<Py_ssize_t>(i)));
        if (at == -1) return nullptr;
        moved |= addresses[i] != at;
        addresses[i] = at;
    }
    return Py_BuildValue("(OL)", moved ? Py_True : Py_False, static_cast<long long>(changes));
}

// again(memory, params, params before, parameters, idle, states, addresses): whether a gradient is elsewhere
// than `addresses` says, into which their addresses are written, and the sum of the versions of entries that are
// watched, which grows if any of them is changed. None if anything is not as it was.
PyObject *again(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    Memory *memory = count == 7 ? memory_of(arguments[0]) : nullptr;
    for (Py_ssize_t i = 2; memory != nullptr && i < 6; i++)
        if (!PyList_Check(arguments[i])) memory = nullptr;
    if (memory == nullptr) return PyErr_Format(PyExc_TypeError, "again takes a memory, lists and an array");
    Py_buffer buffer;
    if (PyObject_GetBuffer(arguments[6], &buffer, PyBUF_WRITABLE) != 0) return nullptr;
    PyObject *found = nullptr;
    try {
        if (buffer.len == static_cast<Py_ssize_t>(memory->own.size() * sizeof(int64_t)))
            found = look(*memory, arguments + 1, static_cast<int64_t *>(buffer.buf));
    } catch (...) {  // of torch, of a tensor that has no memory
    }
    PyBuffer_Release(&buffer);
    if (found != nullptr) return found;
    PyErr_Clear();  // whoever looks at everything anew will meet it, and say it in words
    Py_RETURN_NONE;
}

// same(dictionary, values, version): -1, unless these are its values, in their order; its version otherwise, as
// `version_of` has it. With that of the last look nothing has to be walked through.
PyObject *same(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyList_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "same takes a dictionary, a list and a number");
    if (!PyDict_Check(arguments[0])) return PyLong_FromLong(-1);
    auto version = static_cast<long long>(version_of(arguments[0])), before = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred()) return nullptr;
    if (version != 0 && version == before) return PyLong_FromLongLong(version);
    PyObject *key, *value;
    Py_ssize_t position = 0, seen = 0, values = PyList_GET_SIZE(arguments[1]);
    while (PyDict_Next(arguments[0], &position, &key, &value)) {
        if (seen == values || value != PyList_GET_ITEM(arguments[1], seen)) return PyLong_FromLong(-1);
        seen++;
    }
    return PyLong_FromLongLong(seen == values ? version : -1);
}

// count(address, how many, by): so many numbers there, float64, grow by that; the first of them, if all are the
// same by then, otherwise None.
PyObject *advance(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3) return PyErr_Format(PyExc_TypeError, "count takes an address and two numbers");
    auto *counts = static_cast<double *>(PyLong_AsVoidPtr(arguments[0]));
    auto numbers = PyLong_AsSsize_t(arguments[1]);
    auto by = PyFloat_AsDouble(arguments[2]);
    if (PyErr_Occurred()) return nullptr;
    bool alike = true;
    for (Py_ssize_t i = 0; i < numbers; i++) {
        counts[i] += by;
        alike &= counts[i] == counts[0];
    }
    if (numbers == 0 || !alike) Py_RETURN_NONE;
    return PyFloat_FromDouble(counts[0]);
}

// use(Tensor, Parameter, a tensor, its address as torch tells it)
PyObject *use(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 4) return PyErr_Format(PyExc_TypeError, "use takes two classes, a tensor and an address");
    void *tensor = PyLong_AsVoidPtr(arguments[3]);
    if (tensor == nullptr) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "no address");
    for (within = sizeof(PyObject); within < 64; within += sizeof(void *)) {
        if (behind(arguments[2]) != tensor) continue;
        for (int i = 0; i < 2; i++) {
            Py_INCREF(arguments[i]);
            plain[i] = reinterpret_cast<PyTypeObject *>(arguments[i]);
        }
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_RuntimeError, "a Python tensor does not say which tensor it is");
}

PyCFunction quick(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t))
{
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef functions[] = {
    {"use", quick(use), METH_FASTCALL, nullptr},
    {"remember", quick(remember), METH_FASTCALL, nullptr},
    {"again", quick(again), METH_FASTCALL, nullptr},
    {"count", quick(advance), METH_FASTCALL, nullptr},
    {"same", quick(same), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "look", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_look(void) { return PyModule_Create(&module); }
