/* fg_error and names: the few lines of the contract that have a body. */
#include "flexgemm.h"

#include <stdarg.h>
#include <stdio.h>

fg_status fg_fail(fg_error *error, fg_status code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    error->code = code;
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
    return code;
}

const char *fg_dtype_name(fg_dtype dtype) {
    static const char *const names[FG_DTYPE_COUNT] = {
        "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "uint8",
    };
    return names[dtype];
}

const char *fg_algorithm_name(fg_algorithm algorithm) {
    static const char *const names[FG_ALGORITHM_COUNT] = {
        "auto",
        "explicit_gemm",
        "implicit_gemm",
        "implicit_gemm_splitk",
        "masked_implicit_gemm",
        "masked_implicit_gemm_splitk",
    };
    return names[algorithm];
}
