/*
 * How long tiles of the Hopper kernels for products take: what plans of gemm (plan_gemm.c) are made by.
 */
#ifndef FLEXGEMM_PLAN_DURATIONS_H
#define FLEXGEMM_PLAN_DURATIONS_H

#include "plan.h"

/* A tile: blocks that share it, and its duration: of a step of K, of a row in it and step (0: of a large tile, which takes
 * as long for a few), and of its end; of a large one both again where groups have any sizes and many tiles lack rows, and of
 * its end where it is added to the output; and what the first one takes longer than those whose begin is hidden. The unit is
 * the same for all of a kind; fitted to times of an H200. */
typedef struct {
    int32_t block_m, block_n, num_stages, blocks;
    double step, row, end, step_of_part, end_of_part, end_of_added, begin;
} gemm_tile;

/* The same of a tile of few rows: of a step where up to three quarters of the multiprocessors have one, and where more of
 * them read as fast as the memory goes. */
typedef struct {
    double step, full_step, end;
} decode_tile;

/* Of tiles of that kernel for usual outputs, of which several lie below each other: the most rows that there are tiles of;
 * a step, and a row in it; begin and end, and how much longer each further wave takes than its steps. */
typedef struct {
    int32_t most;
    double step, row, end, again;
} fitting_tile;

/* Durations of the tiles that a kind of product has. */
typedef struct {
    gemm_tile large[11]; /* widest first; blocks 0: there is no other */
    /* Of the kernel for groups of some rows, where there is one group and where there are more: the tallest that shorter
     * ones resemble, and a taller one; block_m 0: there is none. */
    gemm_tile some[2], tallest[2];
    gemm_tile chosen, tallest_chosen; /* the same where the device chooses how tall they are */
    decode_tile few;                  /* 128 of few rows by 64 columns */
    fitting_tile fitting[2];          /* by 64 columns, by 128 */
    double last_end;   /* ends of the others, but for those of the last wave, are hidden behind the next ones */
    double share;      /* where blocks share the K of a tile: to exchange their sums */
    double pair_share; /* the same where those of a pair share that of a large one */
    double own_b;      /* steps that one of those takes, where each block reads all of B */
    double apart; /* the same of a pair whose blocks have rows of two groups, beside as many others as there may be */
    double bytes; /* that memory reads in a unit */
    double read_again; /* of what tiles of a group could share of B in L2: where groups differ they do not keep step */
    /* The same of large tiles in one row, whose weights are read once; and how much longer that makes a step. */
    double one_row_bytes, one_row_step;
} gemm_durations;

/* Of up to 64 rows of any kind, by 64 columns and by 128: weights are what is read. */
static const decode_tile fewest_narrow = {1.82, 1.82, 7.2}, fewest_wide = {3.6, 3.6, 11.4};

static const gemm_durations promoted = {
    .large = {{256, 272, 4, 2, 4.16, 0, 12.4, 4.43, 12.4, 12.4, 28},
              {256, 256, 4, 2, 4.02, 0, 9, 4.14, 11.8, 55.5, 8},
              {128, 256, 4, 1, 4.25, 0, 6.5, 4.48, 8.7, 42.3, 0},
              {128, 224, 4, 1, 3.67, 0, 8.9, 3.7, 9, 53.9, 0},
              {256, 192, 5, 2, 3.23, 0, 11, 3.33, 11.7, 40.2, 8},
              {128, 192, 5, 1, 3.55, 0, 4.9, 3.53, 6.5, 27.6, 0},
              {256, 176, 5, 2, 3.03, 0, 13.8, 3.12, 13.8, 45.8, 10},
              {128, 176, 5, 1, 3.3, 0, 4.6, 3.39, 7.5, 33.9, 0},
              {256, 128, 6, 2, 2.67, 0, 8.9, 2.75, 8.9, 23, 0},
              {128, 128, 6, 1, 2.74, 0, 1, 2.6, 2.7, 20, 0},
              {128, 96, 6, 1, 2.23, 0, 1, 2.26, 1.0, 14.9, 0}},
    .chosen = {FG_SOME_PROMOTED, 256, 5, 2, 0.6, 0.0161, 15.1, 0.6, 15.1, 15.1, 0},
    .some = {{192, 256, 5, 2, 0.71, 0.017, 5.2, 0.71, 5.2, 5.2, 26}, {192, 256, 5, 2, 0.72, 0.019, 8, 0.72, 8, 8, 0}},
    .few = {1.9, 2.3, 11.5},
    .fitting = {{FG_FITTING_FP8, 0.213, 0.0102, 23.7, 6.3}, {FG_FITTING_FP8_WIDE, 0.725, 0.0110, 27.5, 10.8}},
    .share = 7,
    .last_end = 18,
    .pair_share = 10,
    .own_b = 1.25,
    .apart = 1.2,
    .bytes = 650e3,
    .read_again = 0.55,
    .one_row_bytes = 390e3,
    .one_row_step = 1.5,
};
/* With scales of blocks. There is no 128 x 256, since one of the others was faster or as fast nearly everywhere. */
static const gemm_durations scaled = {
    .large = {{256, 256, 4, 2, 3.65, 0, 12.7, 3.65, 15.2, 59.5, 0},
              {256, 128, 5, 2, 2.5, 0, 9.4, 2.5, 9.4, 25.9, 0},
              {128, 128, 5, 1, 2.52, 0, 1.0, 2.52, 3.5, 14.9, 0}},
    .chosen = {FG_SOME_SCALED, 256, 5, 2, 0.78, 0.0172, 13.6, 0.78, 13.6, 13.6, 0},
    .some = {{160, 256, 5, 2, 0.9, 0.019, 5.2, 0.9, 5.2, 5.2, 0}, {160, 256, 5, 2, 0.9, 0.02, 9, 0.9, 9, 9, 0}},
    .few = {2.05, 2.3, 8},
    .fitting = {{FG_FITTING_SCALED, 0.89, 0.0087, 25, 6}, {FG_FITTING_SCALED_WIDE}},
    .share = 6,
    .last_end = 10,
    .pair_share = 10,
    .own_b = 1.16,
    .apart = 1.2,
    .bytes = 750e3,
    .read_again = 0.55,
    .one_row_bytes = 550e3,
    .one_row_step = 1.1,
};
/* Of fp16 and bf16, whose sums are not promoted. */
static const gemm_durations halves = {
    .large = {{256, 272, 4, 2, 4.25, 0, 14, 4.73, 14, 14, 22},
              {256, 256, 4, 2, 4, 0, 9.9, 4, 14, 71.4, 16},
              {128, 256, 4, 1, 4.4, 0, 0.9, 4.52, 8.4, 22.3, 5},
              {128, 224, 4, 1, 3.62, 0, 9.5, 3.8, 9, 50, 0},
              {256, 192, 5, 2, 3.09, 0, 8.4, 3.09, 11.3, 37.3, 9},
              {128, 192, 5, 1, 3.42, 0, 1.9, 3.54, 4.6, 10.5, 0},
              {256, 176, 5, 2, 2.83, 0, 13.6, 2.83, 13.6, 36.7, 6},
              {128, 176, 5, 1, 3.16, 0, 0.8, 3.17, 9.4, 17.4, 0},
              {256, 128, 6, 2, 2.29, 0, 8.6, 2.29, 8.6, 20, 9},
              {128, 128, 6, 1, 2.49, 0, 0, 2.51, 1.7, 7.5, 0},
              {128, 96, 6, 1, 1.98, 0, 1, 2.04, 1, 2.3, 0}},
    .chosen = {192, 256, 5, 2, 0.75, 0.0145, 12.8, 0.75, 12.8, 12.8, 0},
    .tallest_chosen = {FG_SOME_HALVES, 256, 4, 2, 0.835, 0.0162, 14.5, 0.835, 14.5, 14.5, 0},
    .some = {{192, 256, 5, 2, 0.74, 0.0147, 5.5, 0.74, 5.5, 5.5, 16},
             {192, 256, 5, 2, 0.76, 0.0147, 13, 0.76, 13, 13, 0}},
    .tallest = {{256, 256, 4, 2, 1.0, 0.0147, 20, 1.0, 20, 20, 16},
                {256, 256, 4, 2, 1.09, 0.014, 19.9, 1.09, 19.9, 19.9, 0}},
    .few = {1.7, 2.28, 8.5},
    .fitting = {{FG_FITTING_HALVES, 0.457, 0.00806, 12.5, 5.7}, {FG_FITTING_HALVES_WIDE, 0.376, 0.0146, 18.4, 7.4}},
    .share = 9.3,
    .last_end = 12,
    .pair_share = 13,
    .own_b = 1.16,
    .apart = 1.3,
    .bytes = 660e3,
    .read_again = 0.8,
    .one_row_bytes = 390e3,
    .one_row_step = 1.5,
};

#endif
