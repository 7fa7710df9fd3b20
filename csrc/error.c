/*
 * fg_error -> exception. Backends fill an fg_error without the GIL; here it becomes an exception with it.
 */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

PyObject *fg_raise(const fg_error *error) {
    PyObject *type = PyExc_SystemError;
    switch (error->code) {
        case FG_ERROR_TYPE:
            type = PyExc_TypeError;
            break;
        case FG_ERROR_VALUE:
            type = PyExc_ValueError;
            break;
        case FG_ERROR_MEMORY:
            type = PyExc_MemoryError;
            break;
        case FG_ERROR_UNSUPPORTED:
            type = PyExc_NotImplementedError;
            break;
        case FG_ERROR_DEVICE:
            type = PyExc_RuntimeError;
            break;
        case FG_OK:
            break; /* a backend that fails without a code is a bug: SystemError */
    }
    PyErr_SetString(type, error->message);
    return NULL;
}

void fg_note_argument(const char *name) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *done =
        value ? PyObject_CallMethod(value, "add_note", "N",
                                    PyUnicode_FromFormat("flexgemm: raised while reading argument '%s'", name))
              : NULL;
    if (!done) PyErr_Clear(); /* the exporter's own exception matters more than the note */
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

void fg_text_add(fg_text *text, const char *format, ...) {
    const size_t room = sizeof text->data - text->length;
    va_list args;
    va_start(args, format);
    const int wanted = vsnprintf(text->data + text->length, room, format, args);
    va_end(args);
    if (wanted > 0) text->length += (size_t)wanted < room ? (size_t)wanted : room - 1;
}

void fg_text_add_tuple(fg_text *text, const int64_t *values, int count) {
    fg_text_add(text, "(");
    for (int i = 0; i < count; i++) fg_text_add(text, i ? ", %lld" : "%lld", (long long)values[i]);
    fg_text_add(text, count == 1 ? ",)" : ")");
}
