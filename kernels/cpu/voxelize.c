/*
 * From points to voxels: the code of the voxel around each point, and the distinct ones among sorted codes.
 */
#include "../floats.h"
#include "../place.h"
#include "hash_table.h"

/* ---- codes ---- */

fg_status fg_cpu_voxel_codes(const fg_voxel_codes_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue, (void)error;
    const fg_curve curve = fg_make_curve(FG_BXYZ, params->shape);
    const int64_t n = params->points.shape[0], columns = params->points.shape[1];
    const float *points = params->points.data;
#pragma omp parallel
    {
        FG_DEFAULT_FLOATS;
#pragma omp for
        for (int64_t row = 0; row < n; row++) {
            const float *point = points + columns * row, batch = columns == 4 ? *point++ : 0.0f;
            float place[3];
            int32_t coord[4];
            const bool inside = fg_find_voxel(&curve, batch, point, params->voxel_size, params->origin, place, coord);
            fg_store_word(&params->code, row, inside ? fg_encode(&curve, coord) : FG_ALL_ONES);
            if (!params->places.present) continue;
            float *out = (float *)params->places.data + 4 * row;
            out[0] = batch;
            for (int axis = 0; axis < 3; axis++) out[axis + 1] = place[axis];
        }
    }
    return FG_OK;
}

/* ---- distinct keys ---- */

fg_status fg_cpu_unique_ranks(const fg_unique_ranks_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue, (void)error;
    const int64_t n = params->sorted.shape[0];
    const uint64_t none = fg_all_ones(&params->sorted);
    int32_t *ranks = params->ranks.data, rank = 0;
    uint64_t before = none;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t key = fg_load_word(&params->sorted, i);
        rank += key != none && key != before;
        ranks[i] = rank;
        before = key;
    }
    *(int32_t *)params->count.data = rank;
    return FG_OK;
}

fg_status fg_cpu_unique_groups(const fg_unique_groups_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t n = params->sorted.shape[0], groups = params->keys.shape[0];
    const uint64_t none = fg_all_ones(&params->sorted);
    const int32_t *order = params->order.data, *ranks = params->ranks.data;
    int32_t *starts = params->starts.data, *first = params->first.data, *counts = params->counts.data;
    int32_t *inverse = params->inverse.data;
    int32_t rank = 0;
    starts[groups] = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t key = fg_load_word(&params->sorted, i);
        if (order[i] < 0 || order[i] >= n)
            return fg_fail(error, FG_ERROR_VALUE, "order: entry %lld is %d, expected a row below %lld", (long long)i,
                           order[i], (long long)n);
        if (ranks[i] < rank || ranks[i] > rank + (key != none) || ranks[i] > groups || (key != none && ranks[i] == 0))
            return fg_fail(error, FG_ERROR_VALUE, "ranks: entry %lld is %d, expected the rank of sorted there",
                           (long long)i, ranks[i]);
        inverse[order[i]] = key == none ? -1 : ranks[i] - 1;
        if (key == none) continue;
        if (ranks[i] > rank) {
            fg_store_word(&params->keys, rank, key);
            starts[rank] = (int32_t)i;
            first[rank] = order[i];
        }
        rank = ranks[i];
        starts[groups] = (int32_t)i + 1;
    }
    if (rank < groups)
        return fg_fail(error, FG_ERROR_VALUE, "ranks: expected %lld distinct keys to match keys, got %d",
                       (long long)groups, rank);
    for (int64_t m = 0; m < groups; m++) counts[m] = starts[m + 1] - starts[m];
    return FG_OK;
}
