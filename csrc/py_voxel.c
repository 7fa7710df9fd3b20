/*
 * Voxel structure: the output sites of a sparse convolution, its neighbour map, and the orders and segments in which to
 * work through the map's rows.
 */
#include "../kernels/plan.h"
#include "../kernels/segment.h"

#include "coords.h"
#include "operation.h"

/* ---- grids and kernels ---- */

static int expect_same_batch(const char *name, const int64_t *shape, const int64_t *other) {
    if (shape[0] == other[0]) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected a batch of %lld to match shape, got %lld", name, (long long)other[0],
                 (long long)shape[0]);
    return -1;
}

/* ---- neighbour map ---- */

static const fg_parameter neighbor_map_parameters[] = {
    FG_INPUT(coords),
    FG_OUTPUT(map),
    FG_REQUIRED_SCALAR(shape),
    FG_REQUIRED_SCALAR(kernel_size),
    FG_REQUIRED_SCALAR(dilation),
    FG_OPTIONAL_INPUT(queries),
    FG_SCALAR(query_shape),
    FG_SCALAR(stride),
    FG_SCALAR(padding),
    FG_SCALAR(transposed),
    FG_SCALAR(check),
    FG_OPTIONAL_OUTPUT(order),
    FG_SCALAR(groups),
    FG_SCALAR(phases),
    FG_WORKSPACE_AND_STREAM,
};

static int neighbor_map_fill(fg_call *call, void *params) {
    enum {
        COORDS,
        MAP,
        SHAPE,
        KERNEL_SIZE,
        DILATION,
        QUERIES,
        QUERY_SHAPE,
        STRIDE,
        PADDING,
        TRANSPOSED,
        CHECK,
        ORDER,
        GROUPS,
        PHASES
    };
    fg_neighbor_map_params *p = params;
    const fg_view *coords = &call->views[COORDS], *map = &call->views[MAP], *queries = &call->views[QUERIES];
    const fg_view *order = &call->views[ORDER];
    if (fg_arg_grid(call->values[SHAPE], "shape", p->shape) < 0 ||
        fg_arg_axes(call->values[KERNEL_SIZE], "kernel_size", FG_MAX_KERNEL, p->kernel) < 0 ||
        fg_arg_axes(call->values[DILATION], "dilation", INT32_MAX, p->dilation) < 0 ||
        fg_arg_bool(call->values[TRANSPOSED], "transposed", &p->transposed) < 0 ||
        fg_arg_bool(call->values[CHECK], "check", &p->check) < 0 ||
        fg_arg_sets_of(call->values[GROUPS], call->values[PHASES], p->kernel, &p->sets) < 0) {
        return -1;
    }
    /* Without queries: a submanifold convolution. */
    int64_t volume = 1;
    for (int i = 0; i < 3; i++) {
        p->stride[i] = 1;
        p->padding[i] = (int64_t)(p->kernel[i] / 2) * p->dilation[i];
        volume *= p->kernel[i];
    }
    for (int i = 0; i < 4; i++) p->query_shape[i] = p->shape[i];
    PyObject *const with_queries[] = {call->values[QUERY_SHAPE], call->values[STRIDE], call->values[PADDING]};
    for (int i = 0; i < FG_LENGTH(with_queries); i++) {
        const bool is_given = with_queries[i] && with_queries[i] != Py_None;
        if (is_given == queries->tensor.present) continue;
        PyErr_SetString(PyExc_ValueError, "queries: expected query_shape, stride and padding with them and only then");
        return -1;
    }
    if (queries->tensor.present && (fg_arg_grid(call->values[QUERY_SHAPE], "query_shape", p->query_shape) < 0 ||
                                    expect_same_batch("query_shape", p->query_shape, p->shape) < 0 ||
                                    fg_arg_axes(call->values[STRIDE], "stride", INT32_MAX, p->stride) < 0 ||
                                    fg_arg_ints(call->values[PADDING], "padding", 0, INT32_MAX, 3, p->padding) < 0 ||
                                    fg_expect_coords(queries, FG_ANY, NULL) < 0)) {
        return -1;
    }
    if (fg_expect_coords(coords, FG_ANY, NULL) < 0) return -1;
    p->coords = coords->tensor;
    p->queries = queries->tensor.present ? queries->tensor : coords->tensor;
    const char *why = queries->tensor.present ? "to match kernel_size and queries" : "to match kernel_size and coords";
    if (fg_expect_map(map, volume, p->queries.shape[0], why) < 0) return -1;
    p->map = map->tensor;
    const fg_dim all = {NULL, fg_order_count(&p->sets)}, rows = {NULL, map->tensor.shape[1]};
    if (order->tensor.present && fg_expect_matrix(order, FG_INT32, all, rows, "to match groups and map") < 0) return -1;
    p->order = order->tensor;
    return 0;
}

/* ---- output sites ---- */

enum { MAX_SITE_BITS = 63 }; /* a code above all others tells positions that lead nowhere */

static const fg_parameter conv_sites_parameters[] = {
    FG_INPUT(coords),
    FG_OUTPUT(code),
    FG_OUTPUT(count),
    FG_REQUIRED_SCALAR(shape),
    FG_REQUIRED_SCALAR(out_shape),
    FG_REQUIRED_SCALAR(code_shape),
    FG_REQUIRED_SCALAR(mode),
    FG_REQUIRED_SCALAR(kernel_size),
    FG_REQUIRED_SCALAR(stride),
    FG_REQUIRED_SCALAR(padding),
    FG_REQUIRED_SCALAR(dilation),
    FG_SCALAR(transposed),
    FG_WORKSPACE_AND_STREAM,
};

static int conv_sites_fill(fg_call *call, void *params) {
    enum {
        COORDS,
        CODE,
        COUNT,
        SHAPE,
        OUT_SHAPE,
        CODE_SHAPE,
        MODE,
        KERNEL_SIZE,
        STRIDE,
        PADDING,
        DILATION,
        TRANSPOSED
    };
    fg_conv_sites_params *p = params;
    const fg_view *coords = &call->views[COORDS], *code = &call->views[CODE], *count = &call->views[COUNT];
    int mode = 0;
    if (fg_arg_grid(call->values[SHAPE], "shape", p->shape) < 0 ||
        fg_arg_grid(call->values[OUT_SHAPE], "out_shape", p->out_shape) < 0 ||
        expect_same_batch("out_shape", p->out_shape, p->shape) < 0 ||
        fg_arg_grid(call->values[CODE_SHAPE], "code_shape", p->code_shape) < 0 ||
        fg_arg_choice(call->values[MODE], "mode", call->state->sequences, FG_SEQUENCE_COUNT, &mode) < 0 ||
        fg_arg_axes(call->values[KERNEL_SIZE], "kernel_size", FG_MAX_KERNEL, p->kernel) < 0 ||
        fg_arg_axes(call->values[STRIDE], "stride", INT32_MAX, p->stride) < 0 ||
        fg_arg_ints(call->values[PADDING], "padding", 0, INT32_MAX, 3, p->padding) < 0 ||
        fg_arg_axes(call->values[DILATION], "dilation", INT32_MAX, p->dilation) < 0 ||
        fg_arg_bool(call->values[TRANSPOSED], "transposed", &p->transposed) < 0 ||
        fg_expect_coords(coords, FG_ANY, NULL) < 0) {
        return -1;
    }
    p->mode = (fg_sequence)mode;
    bool room = fg_sequence_bits(p->mode, p->code_shape) <= MAX_SITE_BITS;
    for (int i = 0; i < 4; i++) room = room && p->code_shape[i] >= p->out_shape[i];
    if (!room) {
        PyErr_Format(PyExc_ValueError,
                     "code_shape: expected codes of at most %d bits and nowhere less than out_shape, got "
                     "(%lld, %lld, %lld, %lld)",
                     MAX_SITE_BITS, (long long)p->code_shape[0], (long long)p->code_shape[1],
                     (long long)p->code_shape[2], (long long)p->code_shape[3]);
        return -1;
    }
    const fg_sites_plan plan = fg_plan_conv_sites(p->kernel, p->stride, p->dilation, p->transposed);
    const int64_t most = coords->tensor.shape[0] * plan.per_voxel;
    if (fg_expect_vector(code, FG_BIT(FG_INT64), most, "to match coords, kernel_size, stride and dilation") < 0 ||
        fg_expect_vector(count, FG_BIT(FG_INT64), 1, NULL) < 0) {
        return -1;
    }
    p->coords = coords->tensor;
    p->code = code->tensor;
    p->count = count->tensor;
    return 0;
}

/* ---- row orders ---- */

static const fg_parameter row_order_parameters[] = {
    FG_INPUT(map),     FG_OUTPUT(order),  FG_REQUIRED_SCALAR(kernel_size),
    FG_SCALAR(groups), FG_SCALAR(phases), FG_WORKSPACE_AND_STREAM,
};

static int row_order_fill(fg_call *call, void *params) {
    enum { MAP, ORDER, KERNEL_SIZE, GROUPS, PHASES };
    fg_row_order_params *p = params;
    const fg_view *map = &call->views[MAP], *order = &call->views[ORDER];
    if (fg_arg_axes(call->values[KERNEL_SIZE], "kernel_size", FG_MAX_KERNEL, p->kernel) < 0 ||
        fg_arg_sets_of(call->values[GROUPS], call->values[PHASES], p->kernel, &p->sets) < 0) {
        return -1;
    }
    const int64_t volume = (int64_t)p->kernel[0] * p->kernel[1] * p->kernel[2];
    if (fg_expect_map(map, volume, FG_ANY, "to match kernel_size") < 0) return -1;
    const fg_dim all = {NULL, fg_order_count(&p->sets)}, rows = {NULL, map->tensor.shape[1]};
    if (fg_expect_matrix(order, FG_INT32, all, rows, "to match groups and map") < 0) return -1;
    p->map = map->tensor;
    p->order = order->tensor;
    return 0;
}

/* ---- ordered map ---- */

static const fg_parameter ordered_map_parameters[] = {
    FG_INPUT(map),
    FG_INPUT(order),
    FG_OUTPUT(out),
    FG_WORKSPACE_AND_STREAM,
};

static int ordered_map_fill(fg_call *call, void *params) {
    enum { MAP, ORDER, OUT };
    fg_ordered_map_params *p = params;
    const fg_view *map = &call->views[MAP], *order = &call->views[ORDER], *out = &call->views[OUT];
    if (fg_expect_map(map, FG_ANY, FG_ANY, NULL) < 0) return -1;
    const fg_dim any = {"G", FG_ANY}, columns = {NULL, map->tensor.shape[1]};
    if (fg_expect_matrix(order, FG_INT32, any, columns, "to match map") < 0) return -1;
    if (order->tensor.shape[0] == 0) return fg_wrong_shape(order, "(G, N), G at least 1");
    const fg_dim rows = {NULL, order->tensor.shape[0] + map->tensor.shape[0]};
    if (fg_expect_matrix(out, FG_INT32, rows, columns, "to match order and map") < 0) return -1;
    p->map = map->tensor;
    p->order = order->tensor;
    p->out = out->tensor;
    return 0;
}

/* ---- segments ---- */

static const fg_parameter segment_map_parameters[] = {
    FG_INPUT(map),
    FG_INPUT(order),
    FG_OUTPUT(segments),
    FG_REQUIRED_SCALAR(kernel_size),
    FG_REQUIRED_SCALAR(tiles),
    FG_REQUIRED_SCALAR(in_rows),
    FG_WORKSPACE_AND_STREAM,
};

static int segment_map_fill(fg_call *call, void *params) {
    enum { MAP, ORDER, SEGMENTS, KERNEL_SIZE, TILES, IN_ROWS };
    fg_segment_map_params *p = params;
    const fg_view *map = &call->views[MAP], *order = &call->views[ORDER], *segments = &call->views[SEGMENTS];
    if (fg_arg_axes(call->values[KERNEL_SIZE], "kernel_size", FG_MAX_KERNEL, p->kernel) < 0 ||
        fg_arg_segment_tiles(call->values[TILES], "tiles", 2, &p->tiles) < 0 ||
        fg_arg_int64(call->values[IN_ROWS], "in_rows", 0, INT64_MAX, &p->in_rows) < 0) {
        return -1;
    }
    const int64_t volume = (int64_t)p->kernel[0] * p->kernel[1] * p->kernel[2];
    if (volume > FG_SEGMENT_VOLUME) {
        PyErr_Format(PyExc_ValueError, "kernel_size: expected a volume of at most %d, got %lld", (int)FG_SEGMENT_VOLUME,
                     (long long)volume);
        return -1;
    }
    if (fg_expect_map(map, volume, FG_ANY, "to match kernel_size") < 0) return -1;
    const int64_t columns = map->tensor.shape[1], rows = fg_segment_rows(p->tiles);
    const fg_dim count = {NULL, columns / rows + (columns % rows > 0)};
    const fg_dim words = {NULL, fg_segment_words(p->tiles, volume)};
    if (fg_expect_vector(order, FG_BIT(FG_INT32), columns, "to match map") < 0 ||
        fg_expect_matrix(segments, FG_INT32, count, words, "to match map, kernel_size and tiles") < 0) {
        return -1;
    }
    p->map = map->tensor;
    p->order = order->tensor;
    p->segments = segments->tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(neighbor_map)
FG_DEFINE_OPERATION(conv_sites)
FG_DEFINE_OPERATION(row_order)
FG_DEFINE_OPERATION(ordered_map)
FG_DEFINE_OPERATION(segment_map)

PyMethodDef fg_voxel_methods[] = {
    FG_OPERATION_METHODS(neighbor_map,
                         "coords, map, *, shape, kernel_size, dilation, queries=None, query_shape=None, stride=None, "
                         "padding=None, transposed=False, check=False, order=None, groups=None, phases=(1, 1, 1), "
                         "workspace=None, stream=None",
                         "map[v, m] = row of the voxel that queries[m] reads at kernel offset v, -1 for none; order: "
                         "what row_order makes of it."),
    FG_OPERATION_METHODS(conv_sites,
                         "coords, code, count, *, shape, out_shape, code_shape, mode, kernel_size, stride, padding, "
                         "dilation, transposed=False, workspace=None, stream=None",
                         "code[:count] = the sorted codes of the sites that a convolution reaches."),
    FG_OPERATION_METHODS(row_order,
                         "map, order, *, kernel_size, groups=None, phases=(1, 1, 1), workspace=None, stream=None",
                         "Columns of map sorted, for each group of offsets, so that neighbours in an order have "
                         "neighbours at the same offsets."),
    FG_OPERATION_METHODS(ordered_map, "map, order, out, *, workspace=None, stream=None",
                         "out[:G] = order; out[G + v, s] = map[v, order[0, s]], -1 where that is no column of map."),
    FG_OPERATION_METHODS(segment_map,
                         "map, order, segments, *, kernel_size, tiles, in_rows, workspace=None, stream=None",
                         "segments[s] = the record of the next 64 * tiles columns of order."),
    {NULL, NULL, 0, NULL},
};
