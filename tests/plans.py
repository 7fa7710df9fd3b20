"""What tests of plans share."""

from __future__ import annotations

import reference

from flexgemm import _C

DTYPES = ["float32", "float16", "bfloat16"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
SMS = 132
HOPPER = 90


KEYS = {
    "family",
    "block_m",
    "block_n",
    "block_k",
    "num_stages",
    "groups",
    "split_k",
    "segment_tiles",
    "few_rows",
    "some_rows",
    "least_rows",
    "overhead_rows",
    "weights",
    "adds_in_shared",
    "workspace_bytes",
}


def check(plan):
    assert set(plan) == KEYS
    assert plan["family"] in ("portable", "sm90")
    assert all(type(value) is int for name, value in plan.items() if name != "family")
    blocks = [plan[f"block_{axis}"] for axis in "mnk"]
    assert all(8 <= block <= 512 and block % 8 == 0 for block in blocks)
    assert 1 <= plan["num_stages"] <= 10
    assert plan["split_k"] >= 1
    assert plan["split_k"] % max(plan["groups"], 1) == 0
    assert plan["workspace_bytes"] >= 0
    return plan


def row_orders(nmap, kernel_size, groups=(1,), phases=(1, 1, 1)):
    """Of a map, sorted in plain Python by the keys that are planned."""
    plan = _C.plan_row_orders(rows=nmap.shape[1], kernel_size=kernel_size, groups=groups, phases=phases)
    return reference.row_orders(nmap, plan["keys"], plan["segment"])


def plan_conv_hopper(**how):
    return _C.plan_conv(**{"compute_capability": HOPPER, **how})


def ordered_plan(rows, ci, co=None, kernel_size=(3, 3, 3), dtype="float16", num_sms=SMS, phases=(1, 1, 1), **how):
    """With the row orders that a map of this many rows and these phases has."""
    sets = _C.plan_order_sets(rows=rows, kernel_size=kernel_size, phases=phases)
    volume = kernel_size[0] * kernel_size[1] * kernel_size[2]
    sizes = {"rows": rows, "ci": ci, "co": co or ci, "v": volume, "dtype": dtype, "num_sms": num_sms}
    return check(plan_conv_hopper(**sizes, groups=sets, phases=phases, **how))


def splits_hold(plan, elements):
    """Partial sums are float32, one set per slice, and nothing else grows with the output."""
    if plan["split_k"] > 1:
        assert plan["workspace_bytes"] >= plan["split_k"] * elements * 4
