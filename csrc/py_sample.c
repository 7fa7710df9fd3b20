/*
 * Sampling of voxels' features at points: the voxels around each point, weighted sums of rows, gradients in the points.
 */
#include "coords.h"
#include "operation.h"

enum { CORNERS = 8 };

/* (B, L, 3) or (Q, 4) float32, contiguous. */
static int expect_grid(const fg_view *grid, int64_t *points) {
    const int64_t *shape = grid->tensor.shape;
    const int32_t ndim = grid->tensor.ndim;
    if (!(ndim == 3 && shape[2] == 3) && !(ndim == 2 && shape[1] == 4))
        return fg_wrong_shape(grid, "(B, L, 3) or (Q, 4)");
    *points = ndim == 3 ? shape[0] * shape[1] : shape[0];
    if (fg_expect_dtype(grid, FG_BIT(FG_FLOAT32)) < 0) return -1;
    return fg_expect_contiguous(grid);
}

/* ---- map ---- */

static const fg_parameter sample_map_parameters[] = {
    FG_INPUT(grid),
    FG_INPUT(coords),
    FG_OUTPUT(indices),
    FG_OUTPUT_OR_NONE(weights),
    FG_REQUIRED_SCALAR(shape),
    FG_WORKSPACE_AND_STREAM,
};

static int sample_map_fill(fg_call *call, void *params) {
    enum { GRID, COORDS, INDICES, WEIGHTS, SHAPE };
    fg_sample_map_params *p = params;
    const fg_view *views = call->views, *weights = &views[WEIGHTS];
    int64_t points = 0;
    if (expect_grid(&views[GRID], &points) < 0 || fg_expect_coords(&views[COORDS], FG_ANY, NULL) < 0 ||
        fg_arg_grid(call->values[SHAPE], "shape", p->shape) < 0) {
        return -1;
    }
    const fg_dim rows = {NULL, points}, columns = {NULL, weights->tensor.present ? CORNERS : 1};
    if (fg_expect_matrix(&views[INDICES], FG_INT32, rows, columns, "to match grid and weights") < 0) return -1;
    if (weights->tensor.present && fg_expect_matrix(weights, FG_FLOAT32, rows, columns, "to match grid") < 0) return -1;
    p->grid = views[GRID].tensor;
    p->coords = views[COORDS].tensor;
    p->indices = views[INDICES].tensor;
    p->weights = weights->tensor;
    return 0;
}

/* ---- samples without a map ---- */

static const fg_parameter sample_forward_parameters[] = {
    FG_INPUT(grid), FG_INPUT(coords),          FG_INPUT(feats),
    FG_OUTPUT(out), FG_REQUIRED_SCALAR(shape), FG_WORKSPACE_AND_STREAM,
};

static int sample_forward_fill(fg_call *call, void *params) {
    enum { GRID, COORDS, FEATS, OUT, SHAPE };
    fg_sample_forward_params *p = params;
    const fg_view *views = call->views, *feats = &views[FEATS], *out = &views[OUT];
    int64_t points = 0;
    if (expect_grid(&views[GRID], &points) < 0 || fg_expect_coords(&views[COORDS], FG_ANY, NULL) < 0 ||
        fg_arg_grid(call->values[SHAPE], "shape", p->shape) < 0 || fg_expect_dtype(feats, FG_FLOATS) < 0 ||
        fg_expect_features(feats, views[COORDS].tensor.shape[0], FG_ANY, "to match coords") < 0 ||
        fg_expect_dtype_of(out, feats) < 0 ||
        fg_expect_features(out, points, feats->tensor.shape[1], "to match grid and feats") < 0) {
        return -1;
    }
    p->grid = views[GRID].tensor;
    p->coords = views[COORDS].tensor;
    p->feats = feats->tensor;
    p->out = out->tensor;
    return 0;
}

/* ---- gradient in the points ---- */

static const fg_parameter sample_grad_parameters[] = {
    FG_INPUT(grad_out), FG_INPUT(feats),      FG_INPUT(grid),
    FG_INPUT(indices),  FG_OUTPUT(grad_grid), FG_WORKSPACE_AND_STREAM,
};

static int sample_grad_fill(fg_call *call, void *params) {
    enum { GRAD_OUT, FEATS, GRID, INDICES, GRAD_GRID };
    fg_sample_grad_params *p = params;
    const fg_view *views = call->views;
    int64_t points = 0;
    if (expect_grid(&views[GRID], &points) < 0) return -1;
    if (fg_expect_dtype(&views[FEATS], FG_FLOATS) < 0 || fg_expect_features(&views[FEATS], FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_dtype_of(&views[GRAD_OUT], &views[FEATS]) < 0 ||
        fg_expect_features(&views[GRAD_OUT], points, views[FEATS].tensor.shape[1], "to match grid and feats") < 0) {
        return -1;
    }
    const fg_tensor *grid = &views[GRID].tensor;
    const fg_dim rows = {NULL, points}, columns = {NULL, CORNERS};
    const fg_dim grid_shape[] = {{NULL, grid->shape[0]}, {NULL, grid->shape[1]}, {NULL, grid->shape[2]}};
    if (fg_expect_matrix(&views[INDICES], FG_INT32, rows, columns, "to match grid") < 0 ||
        fg_expect_dtype(&views[GRAD_GRID], FG_BIT(FG_FLOAT32)) < 0 ||
        fg_expect_shape(&views[GRAD_GRID], grid->ndim, grid_shape, "to match grid") < 0 ||
        fg_expect_contiguous(&views[GRAD_GRID]) < 0) {
        return -1;
    }
    p->grad_out = views[GRAD_OUT].tensor;
    p->feats = views[FEATS].tensor;
    p->grid = views[GRID].tensor;
    p->indices = views[INDICES].tensor;
    p->grad_grid = views[GRAD_GRID].tensor;
    return 0;
}

/* ---- weighted sums of rows ---- */

static const fg_parameter gather_sum_parameters[] = {
    FG_INPUT(feats), FG_INPUT(indices), FG_INPUT_OR_NONE(weights), FG_OUTPUT(out), FG_WORKSPACE_AND_STREAM,
};

static int gather_sum_fill(fg_call *call, void *params) {
    enum { FEATS, INDICES, WEIGHTS, OUT };
    fg_gather_sum_params *p = params;
    const fg_view *feats = &call->views[FEATS], *indices = &call->views[INDICES];
    const fg_view *weights = &call->views[WEIGHTS], *out = &call->views[OUT];
    if (fg_expect_dtype(feats, FG_FLOATS) < 0 || fg_expect_features(feats, FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_matrix(indices, FG_INT32, (fg_dim){"Q", FG_ANY}, (fg_dim){"K", FG_ANY}, NULL) < 0) {
        return -1;
    }
    const fg_dim rows = {NULL, indices->tensor.shape[0]}, terms = {NULL, indices->tensor.shape[1]};
    if (weights->tensor.present && fg_expect_matrix(weights, FG_FLOAT32, rows, terms, "to match indices") < 0)
        return -1;
    if (fg_expect_dtype_of(out, feats) < 0 ||
        fg_expect_features(out, rows.size, feats->tensor.shape[1], "to match indices and feats") < 0) {
        return -1;
    }
    p->feats = feats->tensor;
    p->indices = indices->tensor;
    p->weights = weights->tensor;
    p->out = out->tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(sample_map)
FG_DEFINE_OPERATION(sample_forward)
FG_DEFINE_OPERATION(sample_grad)
FG_DEFINE_OPERATION(gather_sum)

PyMethodDef fg_sample_methods[] = {
    FG_OPERATION_METHODS(sample_map, "grid, coords, indices, weights, *, shape, workspace=None, stream=None",
                         "The voxels around each point and their weights; without weights the nearest voxel."),
    FG_OPERATION_METHODS(sample_forward, "grid, coords, feats, out, *, shape, workspace=None, stream=None",
                         "The weighted sums of the features of the voxels around each point."),
    FG_OPERATION_METHODS(sample_grad, "grad_out, feats, grid, indices, grad_grid, *, workspace=None, stream=None",
                         "The gradient of trilinear samples in their points."),
    FG_OPERATION_METHODS(gather_sum, "feats, indices, weights, out, *, workspace=None, stream=None",
                         "out[q] = sum_k weights[q, k] feats[indices[q, k]]."),
    {NULL, NULL, 0, NULL},
};
