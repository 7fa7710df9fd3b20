"""Segments of a neighbour map: what records hold, and whether they are those of a map."""

from __future__ import annotations

import numpy as np
from reference import kernel_offsets

# A segment's record: 16 words of head, its rows, an input row for each place, a place for each pair.
TILE, HEAD = 64, 16


def segment_records(nmap, order, tiles, sort=lambda rows: rows):
    """The records of kernels/segment.h: segments of 64 * tiles columns of nmap as `order` has them, each sorted by
    `sort`; places in order of first appearance, tile by tile and offset by offset."""
    volume, size, most = len(nmap), 64 * tiles, segment_places(tiles)
    records = []
    for start in range(0, len(order), size):
        head = np.zeros(16, np.int32)
        rows = np.full(size, -1, np.int32)
        rows[: len(order[start : start + size])] = sort(order[start : start + size])
        read = np.where(rows >= 0, nmap[:, rows], -1).reshape(volume, tiles, 64).swapaxes(0, 1)  # (tile, offset, row)
        for t in range(tiles):
            head[1 + t : 2 + t].view(np.uint32)[0] = sum(1 << v for v in range(volume) if (read[t, v] >= 0).any())
        inputs = list(dict.fromkeys([-1, *read.ravel().tolist()]))
        place_of = {row: place for place, row in enumerate(inputs)}
        places = np.zeros((volume, tiles, 4, 2, 8), np.uint32)  # warp, half, row
        if len(inputs) <= most:
            head[0] = len(inputs)
            found = [place_of[row] for row in read.ravel().tolist()]
            places = np.reshape(found, (tiles, volume, 4, 2, 8)).swapaxes(0, 1).astype(np.uint32)
        inputs = np.resize([*inputs, *[-1] * most], most).astype(np.int32)
        words = (places[:, :, :, 0] | places[:, :, :, 1] << 16).view(np.int32)
        records.append(np.concatenate([head, rows, inputs, words.ravel()]))
    return np.reshape(records, (len(records), segment_words(tiles, volume))).astype(np.int32)


def segment_places(tiles):
    return {2: 920, 4: 1104}[tiles]


def segment_words(tiles, volume):
    return HEAD + TILE * tiles + segment_places(tiles) + volume * tiles * TILE // 2


def segment_rank(mask, kernel_size):
    """The place of each column of a mask (V, N) in the reflected Gray code of 23 of its bits: those of the offsets of
    the innermost 3x3x3 first, and of a cube the corners, the edges and the faces."""
    offsets = np.abs(kernel_offsets(kernel_size, (1, 1, 1)))
    ring, distance = offsets.max(axis=1), offsets.sum(axis=1)
    by_rank = [v for v in np.lexsort((np.arange(len(offsets)), -distance, ring)) if ring[v] > 0][:23]
    rank = np.zeros(mask.shape[1], np.int64)
    for bit in np.cumsum(mask[by_rank], axis=0) % 2:
        rank = 2 * rank + bit
    return rank


def assert_segments(segments, nmap, order, kernel_size, tiles, in_rows):
    """Segments have the rows of the order, 64 * tiles at a time, sorted, and name the pairs of the map and no others.
    Returns the places that each segment has in use."""
    volume, columns = nmap.shape
    rows_each, places_each = TILE * tiles, segment_places(tiles)
    assert segments.shape == (-(-columns // rows_each), segment_words(tiles, volume))
    real = np.where((order >= 0) & (order < columns), order, -1)
    found = np.full((volume, columns + 1), -1, np.int64)  # the last column: of a row -1
    found[:, :-1] = np.where((nmap >= 0) & (nmap < in_rows), nmap, -1)
    for number, record in enumerate(segments):
        head, rows, inputs, words = np.split(record, np.cumsum([HEAD, rows_each, places_each]))
        expected = np.full(rows_each, -1)
        given = real[number * rows_each :][:rows_each]
        expected[: len(given)] = given
        rank = segment_rank(found[:, expected] >= 0, kernel_size)
        expected = expected[np.lexsort((np.arange(rows_each), rank, expected < 0))]
        np.testing.assert_array_equal(rows, expected)

        neighbors = found[:, rows]
        of_tiles = (neighbors >= 0).reshape(volume, tiles, TILE).any(axis=2)
        masks = (of_tiles * (1 << np.arange(volume))[:, None]).sum(axis=0)
        np.testing.assert_array_equal(head[1 : 1 + tiles].view(np.uint32), masks)
        assert not head[1 + tiles :].any()

        distinct = np.unique(neighbors[neighbors >= 0])
        needed = 1 + len(distinct)
        assert head[0] == (needed if needed <= places_each else 0)
        if head[0] == 0:
            continue
        assert inputs[0] == -1
        np.testing.assert_array_equal(np.sort(inputs[1:needed]), distinct)
        assert (inputs[needed:] == -1).all()
        halves = words.view(np.uint16).reshape(volume, tiles, 4, 8, 2)
        places = halves.transpose(0, 1, 2, 4, 3).reshape(volume, rows_each)  # tile, warp, low or high, group: the row
        assert places.max(initial=0) < needed
        np.testing.assert_array_equal(places > 0, neighbors >= 0)
        np.testing.assert_array_equal(inputs[places], neighbors)
    return segments[:, 0]
