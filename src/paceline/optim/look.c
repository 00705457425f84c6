/* Whether all tensors of a step are as they were at the last, in one call: what members.py asks, for many
 * small tensors in a fifth of the time.
 *
 * It knows no structure of torch: of a tensor it has a handle, as torch's C interface for compiled models has
 * it (aoti_torch_*), and puts a Python tensor into one as any extension of torch does. look.py finds these
 * functions by name, and tries them out in a process of its own before anything here is used.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct opaque *Handle; /* of a tensor; it keeps the tensor alive */
typedef int32_t Error;         /* 0: none */

/* In the order of look.SYMBOLS. */
static struct {
    Error (*new_handle)(Handle *);
    Error (*delete_handle)(Handle);
    Error (*assign)(Handle from, Handle to);
    Error (*is_defined)(Handle, _Bool *);
    Error (*data_ptr)(Handle, void **);
    Error (*layout)(Handle, int32_t *);
    Error (*dtype)(Handle, int32_t *);
    Error (*device_type)(Handle, int32_t *);
    Error (*device_index)(Handle, int32_t *);
    Error (*dim)(Handle, int64_t *);
    Error (*sizes)(Handle, int64_t **);
    Error (*strides)(Handle, int64_t **);
    _Bool (*load)(Handle, PyObject *, _Bool); /* a Python tensor into a handle */
    PyObject *(*wrap)(Handle);                /* the Python tensor of a handle; None of one without a tensor */
    Handle (*grad)(void *);                   /* of the tensor itself, to which a handle points; borrowed */
    _Bool (*is_neg)(Handle);
    int64_t (*version)(Handle); /* how often torch has changed it; those of inference mode have none */
} torch;

static Handle nothing, visitor; /* without a tensor; of the tensor that is looked at */
static PyTypeObject *plain[2];  /* Tensor and Parameter */

static int is_plain(PyObject *object) { return Py_TYPE(object) == plain[0] || Py_TYPE(object) == plain[1]; }

static Handle visit(PyObject *tensor) { return torch.load(visitor, tensor, 0) ? visitor : NULL; }

static void leave(void) { torch.assign(nothing, visitor); }

/* The tensor itself. */
static void *tensor_of(Handle handle) { return *(void **)handle; }

static Handle grad_of(Handle tensor) { return torch.grad(tensor_of(tensor)); }

/* Tensors are spread over more memory than the nearest cache holds, and a good part of a look is to wait for
 * it. So it is asked for some tensors ahead. There may be nothing any more: to ask for it does no harm. */
enum { AHEAD = 8 };

static void fetch(const char *tensor)
{
    __builtin_prefetch(tensor);
    __builtin_prefetch(tensor + 64);
    __builtin_prefetch(tensor + 128);
}

/* --- What a tensor is and how it lies ------------------------------------------------------------------- */

typedef struct {
    PyTypeObject *type; /* plain, and so not kept alive here */
    int32_t layout, dtype, device_type, device_index;
    int64_t dim;
    int64_t *sizes, *strides;
} Kind;

/* Sizes and strides are the tensor's own. What is not strided has none of them. */
static int kind_of(Handle tensor, PyObject *object, int32_t layout, Kind *kind)
{
    kind->type = Py_TYPE(object);
    return !torch.layout(tensor, &kind->layout) && kind->layout == layout && !torch.is_neg(tensor) &&
           !torch.dtype(tensor, &kind->dtype) && !torch.device_type(tensor, &kind->device_type) && !torch.device_index(tensor, &kind->device_index) &&
           !torch.dim(tensor, &kind->dim) && !torch.sizes(tensor, &kind->sizes) &&
           !torch.strides(tensor, &kind->strides);
}

static int is_of_kind(Handle tensor, PyObject *object, const Kind *kind)
{
    Kind now;
    if (Py_TYPE(object) != kind->type || !kind_of(tensor, object, kind->layout, &now)) return 0;
    if (now.dtype != kind->dtype || now.dim != kind->dim) return 0;
    if (now.device_type != kind->device_type || now.device_index != kind->device_index) return 0;
    for (int64_t i = 0; i < kind->dim; i++)
        if (now.sizes[i] != kind->sizes[i] || now.strides[i] != kind->strides[i]) return 0;
    return 1;
}

static int is_empty(const Kind *kind)
{
    for (int64_t i = 0; i < kind->dim; i++)
        if (kind->sizes[i] == 0) return 1;
    return 0;
}

/* --- What is remembered of a group ---------------------------------------------------------------------- */

typedef struct {
    Py_ssize_t parameters, kept;
    Kind *own, *grads; /* one for each parameter; their sizes and strides are copies */
    void **at;         /* where the parameters are */
    /* Of entries of the state; one that is no tensor has none. Parameters have no handles that stay: somebody
     * may hang an optimizer on a parameter, and Python could not see that they keep each other alive. */
    Handle *handles;
    void **kept_at;
    char *watched;               /* whether their versions are asked for */
    void **seen, **grads_seen;   /* tensors themselves, as they were at the last look: for `fetch` alone */
    Py_ssize_t states;
    uint64_t *versions; /* of the dictionaries that they are entries of, when they were last walked through */
} Memory;

static const char NAME[] = "paceline.Memory";

static void forget(Memory *memory)
{
    for (Py_ssize_t i = 0; memory->handles && i < memory->kept; i++)
        if (memory->handles[i]) torch.delete_handle(memory->handles[i]);
    for (Py_ssize_t i = 0; memory->own && memory->grads && i < memory->parameters; i++) {
        PyMem_Free(memory->own[i].sizes);
        PyMem_Free(memory->grads[i].sizes);
    }
    PyMem_Free(memory->own);
    PyMem_Free(memory->grads);
    PyMem_Free(memory->at);
    PyMem_Free(memory->handles);
    PyMem_Free(memory->kept_at);
    PyMem_Free(memory->watched);
    PyMem_Free(memory->seen);
    PyMem_Free(memory->grads_seen);
    PyMem_Free(memory->versions);
    PyMem_Free(memory);
}

static void forget_capsule(PyObject *capsule) { forget(PyCapsule_GetPointer(capsule, NAME)); }

/* Copies of sizes and strides, in one piece of memory. */
static int keep_kind(Handle tensor, PyObject *object, Kind *kept)
{
    Kind now;
    int32_t layout;
    if (torch.layout(tensor, &layout) || !kind_of(tensor, object, layout, &now)) return 0;
    size_t bytes = (size_t)now.dim * sizeof(int64_t);
    int64_t *lengths = PyMem_Malloc(2 * bytes + 1);
    if (!lengths) return 0;
    memcpy(lengths, now.sizes, bytes);
    memcpy(lengths + now.dim, now.strides, bytes);
    now.sizes = lengths;
    now.strides = lengths + now.dim;
    *kept = now;
    return 1;
}

static int keep_all(Memory *memory, PyObject *parameters, PyObject *grads, PyObject *entries, PyObject *watched)
{
    for (Py_ssize_t i = 0; i < memory->parameters; i++) {
        PyObject *parameter = PyList_GET_ITEM(parameters, i), *grad = PyList_GET_ITEM(grads, i);
        if (!is_plain(parameter) || !is_plain(grad)) return 0;
        if (!visit(grad) || !keep_kind(visitor, grad, &memory->grads[i])) return 0;
        if (!visit(parameter) || !keep_kind(visitor, parameter, &memory->own[i])) return 0;
        if (torch.data_ptr(visitor, &memory->at[i])) return 0;
    }
    for (Py_ssize_t i = 0; i < memory->kept; i++) {
        PyObject *entry = PyList_GET_ITEM(entries, i);
        if (!PyObject_TypeCheck(entry, plain[0])) continue;
        if (!is_plain(entry) || torch.new_handle(&memory->handles[i])) return 0;
        if (!torch.load(memory->handles[i], entry, 0)) return 0;
        if (torch.data_ptr(memory->handles[i], &memory->kept_at[i])) return 0;
        memory->watched[i] = PyList_GET_ITEM(watched, i) == Py_True;
    }
    return 1;
}

/* remember(parameters, grads, states, entries, watched): all lists, the last of True and False for each entry.
 * None if not all tensors of them are plain. */
static PyObject *remember(PyObject *self, PyObject *const *lists, Py_ssize_t count)
{
    (void)self;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyList_Check(lists[i])) count = 0;
    if (count != 5 || PyList_GET_SIZE(lists[0]) != PyList_GET_SIZE(lists[1]) ||
        PyList_GET_SIZE(lists[3]) != PyList_GET_SIZE(lists[4]))
        return PyErr_Format(PyExc_TypeError, "remember takes five lists");
    Memory *memory = PyMem_Calloc(1, sizeof(Memory));
    if (!memory) return PyErr_NoMemory();
    size_t parameters = (size_t)PyList_GET_SIZE(lists[0]), states = (size_t)PyList_GET_SIZE(lists[2]);
    size_t kept = (size_t)PyList_GET_SIZE(lists[3]);
    memory->parameters = (Py_ssize_t)parameters;
    memory->states = (Py_ssize_t)states;
    memory->kept = (Py_ssize_t)kept;
    memory->own = PyMem_Calloc(parameters + 1, sizeof(Kind));
    memory->grads = PyMem_Calloc(parameters + 1, sizeof(Kind));
    memory->at = PyMem_Calloc(parameters + 1, sizeof(void *));
    memory->seen = PyMem_Calloc(parameters + 1, sizeof(void *));
    memory->grads_seen = PyMem_Calloc(parameters + 1, sizeof(void *));
    memory->handles = PyMem_Calloc(kept + 1, sizeof(Handle));
    memory->kept_at = PyMem_Calloc(kept + 1, sizeof(void *));
    memory->watched = PyMem_Calloc(kept + 1, 1);
    memory->versions = PyMem_Calloc(states + 1, sizeof(uint64_t));
    int done = memory->own && memory->grads && memory->at && memory->seen && memory->grads_seen &&
               memory->handles && memory->kept_at && memory->watched && memory->versions &&
               keep_all(memory, lists[0], lists[1], lists[3], lists[4]);
    leave();
    PyObject *capsule = done ? PyCapsule_New(memory, NAME, forget_capsule) : NULL;
    if (!capsule) forget(memory);
    if (!done) Py_RETURN_NONE;
    return capsule;
}

/* --- Whether all is as it was --------------------------------------------------------------------------- */

static int are_same(PyObject *some, PyObject *others)
{
    if (!PyList_Check(some) || PyList_GET_SIZE(some) != PyList_GET_SIZE(others)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(some); i++)
        if (PyList_GET_ITEM(some, i) != PyList_GET_ITEM(others, i)) return 0;
    return 1;
}

/* A number that another content of a dictionary does not have; 0: not known. Python 3.14 has none. */
static uint64_t version_of(PyObject *dictionary)
{
#if PY_VERSION_HEX < 0x030E0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return PyDict_Check(dictionary) ? ((PyDictObject *)dictionary)->ma_version_tag : 0;
#pragma GCC diagnostic pop
#else
    (void)dictionary;
    return 0;
#endif
}

/* Whether the states have the entries that they had. */
static int have_entries(Memory *memory, PyObject *states, PyObject *entries)
{
    Py_ssize_t seen = 0;
    if (PyList_GET_SIZE(states) != memory->states) return 0;
    for (Py_ssize_t i = 0; i < memory->states; i++) {
        PyObject *state = PyList_GET_ITEM(states, i), *key, *entry;
        uint64_t version = version_of(state);
        Py_ssize_t position = 0;
        if (version && version == memory->versions[i]) {
            seen += PyDict_GET_SIZE(state);
            continue;
        }
        while (PyDict_Next(state, &position, &key, &entry)) {
            if (seen >= memory->kept || entry != PyList_GET_ITEM(entries, seen)) return 0;
            seen++;
        }
        memory->versions[i] = version;
    }
    return seen == memory->kept;
}

/* Whether they are where they were; and how often those that are watched were changed, all together. */
static int are_there(const Memory *memory, int64_t *changes)
{
    *changes = 0;
    for (Py_ssize_t i = 0; i < memory->kept; i++) {
        Handle handle = memory->handles[i], later = i + AHEAD < memory->kept ? memory->handles[i + AHEAD] : NULL;
        void *at;
        if (later) fetch(tensor_of(later));
        if (!handle) continue;
        if (torch.data_ptr(handle, &at) || at != memory->kept_at[i]) return 0;
        if (memory->watched[i]) *changes += torch.version(handle);
    }
    return 1;
}

/* The gradient of a parameter that is as it was, and where it is; NULL if either is otherwise. */
static PyObject *grad_as_before(const Memory *memory, Py_ssize_t i, PyObject *parameter, void **grad_at)
{
    void *at;
    if (!visit(parameter) || !is_of_kind(visitor, parameter, &memory->own[i]) ||
        torch.data_ptr(visitor, &at) || at != memory->at[i])
        return NULL;
    Handle grad = grad_of(visitor);
    memory->seen[i] = tensor_of(visitor);
    memory->grads_seen[i] = tensor_of(grad);
    PyObject *wrapped = torch.wrap(grad);
    if (!wrapped) return NULL;
    const Kind *kind = &memory->grads[i];
    /* Zeros that were never written have no address. */
    if (is_of_kind(grad, wrapped, kind) && !torch.data_ptr(grad, grad_at) &&
        (*grad_at || is_empty(kind)))
        return wrapped;
    Py_DECREF(wrapped);
    return NULL;
}

static int are_idle(PyObject *parameters)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters); i++) {
        PyObject *parameter = PyList_GET_ITEM(parameters, i);
        _Bool there = 1;
        if (is_plain(parameter)) {
            if (!visit(parameter) || torch.is_defined(grad_of(visitor), &there)) return 0;
        } else { /* whose class may say otherwise */
            PyObject *grad = PyObject_GetAttrString(parameter, "grad");
            there = grad != Py_None;
            Py_XDECREF(grad);
        }
        if (there) return 0;
    }
    return 1;
}

static PyObject *look(Memory *memory, PyObject *const *lists, int64_t *addresses)
{
    PyObject *params = lists[0], *params_before = lists[1], *parameters = lists[2], *idle = lists[3];
    PyObject *states = lists[4], *entries = lists[5];
    int64_t changes;
    if (PyList_GET_SIZE(parameters) != memory->parameters || PyList_GET_SIZE(entries) != memory->kept ||
        !are_same(params, params_before) || !have_entries(memory, states, entries) || !are_there(memory, &changes) ||
        !are_idle(idle))
        return NULL;
    PyObject *grads = PyList_New(memory->parameters);
    if (!grads) return NULL;
    int moved = 0;
    for (Py_ssize_t i = 0; i < memory->parameters; i++) {
        void *at;
        if (i + AHEAD < memory->parameters) {
            fetch(memory->seen[i + AHEAD]);
            fetch(memory->grads_seen[i + AHEAD]);
        }
        PyObject *grad = grad_as_before(memory, i, PyList_GET_ITEM(parameters, i), &at);
        if (!grad) {
            Py_DECREF(grads);
            return NULL;
        }
        PyList_SET_ITEM(grads, i, grad);
        moved |= addresses[i] != (int64_t)(intptr_t)at;
        addresses[i] = (int64_t)(intptr_t)at;
    }
    return Py_BuildValue("(NOL)", grads, moved ? Py_True : Py_False, (long long)changes);
}

/* again(memory, params, params before, parameters, idle, states, entries, addresses): the gradients of the
 * parameters, whether one is elsewhere than `addresses` says, into which their addresses are written, and the
 * sum of the versions of entries that are watched, which grows if any of them is changed. None if anything is
 * not as it was. */
static PyObject *again(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    Memory *memory = count == 8 ? PyCapsule_GetPointer(arguments[0], NAME) : NULL;
    for (Py_ssize_t i = 2; memory && i < 7; i++)
        if (!PyList_Check(arguments[i])) memory = NULL;
    if (!memory) return PyErr_Format(PyExc_TypeError, "again takes a memory, six lists and an array");
    Py_buffer buffer;
    if (PyObject_GetBuffer(arguments[7], &buffer, PyBUF_WRITABLE)) return NULL;
    PyObject *found = NULL;
    if (buffer.len == memory->parameters * (Py_ssize_t)sizeof(int64_t))
        found = look(memory, arguments + 1, buffer.buf);
    PyBuffer_Release(&buffer);
    leave();
    if (found) return found;
    PyErr_Clear(); /* whoever looks at everything anew will meet it, and say it in words */
    Py_RETURN_NONE;
}

/* same(dictionary, values): whether these are its values, in their order. */
static PyObject *same(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !PyDict_Check(arguments[0]) || !PyList_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "same takes a dictionary and a list");
    PyObject *key, *value;
    Py_ssize_t position = 0, seen = 0;
    while (PyDict_Next(arguments[0], &position, &key, &value)) {
        if (seen == PyList_GET_SIZE(arguments[1]) || value != PyList_GET_ITEM(arguments[1], seen))
            Py_RETURN_FALSE;
        seen++;
    }
    return PyBool_FromLong(seen == PyList_GET_SIZE(arguments[1]));
}

/* use(addresses of torch's functions, Tensor, Parameter) */
static PyObject *use(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    void **functions = (void **)&torch;
    if (count != 3 || !PyTuple_Check(arguments[0]) ||
        PyTuple_GET_SIZE(arguments[0]) * (Py_ssize_t)sizeof(void *) != (Py_ssize_t)sizeof(torch))
        return PyErr_Format(PyExc_TypeError, "use takes as many addresses as there are functions");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[0]); i++) {
        functions[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(arguments[0], i));
        if (!functions[i]) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no function %zd", i);
    }
    for (int i = 0; i < 2; i++) {
        Py_INCREF(arguments[1 + i]);
        plain[i] = (PyTypeObject *)arguments[1 + i];
    }
    if (torch.new_handle(&nothing) || torch.new_handle(&visitor))
        return PyErr_Format(PyExc_RuntimeError, "torch makes no handles");
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"use", (PyCFunction)(void (*)(void))use, METH_FASTCALL, NULL},
    {"remember", (PyCFunction)(void (*)(void))remember, METH_FASTCALL, NULL},
    {"again", (PyCFunction)(void (*)(void))again, METH_FASTCALL, NULL},
    {"same", (PyCFunction)(void (*)(void))same, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "look", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_look(void) { return PyModule_Create(&module); }
