/* fg_error -> exception, and the text that error messages are built from. */
#ifndef FG_PY_ERROR_H
#define FG_PY_ERROR_H

#include "module.h"

/* Sets the exception that the code stands for. Returns NULL. */
PyObject *fg_raise(const fg_error *error);

/* Notes on the exception being raised which argument it concerns; keeps its type and message. */
void fg_note_argument(const char *name);

/* A message grown piece by piece; what does not fit is cut. */
typedef struct {
    char data[256];
    size_t length;
} fg_text;

void fg_text_add(fg_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void fg_text_add_tuple(fg_text *text, const int64_t *values, int count); /* "(2, 3)" */

#endif
