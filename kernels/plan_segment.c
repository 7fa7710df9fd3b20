/*
 * Plan of the segments of a map: how many tiles one has, and by which offsets its rows are sorted.
 *
 * A longer segment reads fewer input rows for each of its own, since fewer lie across its border: that is what they are
 * for. But multiprocessors work through whole segments, and the last ones keep some of them waiting.
 */
#include "plan.h"
#include "segment.h"

enum { MIN_ROWS = 32 }; /* for each multiprocessor: a quarter of the shortest segment */

/* What a segment takes a multiprocessor, in proportion: half of the warpgroups have no tile of a shorter one, and its
 * rows differ more in their neighbours. */
static const struct {
    int32_t tiles, cost;
} lengths[] = {{4, 53}, {2, 41}};

int32_t fg_plan_segment_tiles(int64_t rows, int32_t num_sms) {
    if (rows < (int64_t)MIN_ROWS * num_sms) return 0;
    int32_t best = 0;
    int64_t least = INT64_MAX;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const int64_t segments = (rows - 1) / fg_segment_rows(lengths[i].tiles) + 1;
        const int64_t cost = ((segments - 1) / num_sms + 1) * lengths[i].cost;
        if (cost >= least) continue;
        least = cost;
        best = lengths[i].tiles;
    }
    return best;
}

fg_segment_rank fg_plan_segment_rank(const int32_t kernel[3]) {
    uint16_t offsets[FG_MAX_VOLUME];
    const int32_t count = fg_offsets_by_rank(kernel, offsets) - 1; /* without the centre */
    fg_segment_rank rank = {.bits = count < FG_SEGMENT_RANK_BITS ? count : FG_SEGMENT_RANK_BITS};
    for (int32_t i = 0; i < rank.bits; i++) rank.offsets[i] = (uint8_t)offsets[i];
    return rank;
}
