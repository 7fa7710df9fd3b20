"""flex_gemm.kernels.cuda: the functions below its operations, on the CPU too."""

from flexgemm.compat.flex_gemm.kernels.cuda.curves import (
    hilbert_decode,
    hilbert_encode,
    z_order_decode,
    z_order_encode,
)
from flexgemm.compat.flex_gemm.kernels.cuda.hashmap import (
    hashmap_insert,
    hashmap_insert_3d,
    hashmap_insert_3d_idx_as_val,
    hashmap_lookup,
    hashmap_lookup_3d,
)
from flexgemm.compat.flex_gemm.kernels.cuda.maps import (
    expand_unique_build_sparse_conv_out_coords,
    hashmap_build_sparse_conv_neighbour_map,
    hashmap_build_sparse_conv_out_coords,
    hashmap_build_submanifold_conv_neighbour_map,
    neighbor_map_post_process_for_masked_implicit_gemm_1,
    neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd,
    neighbor_map_post_process_for_masked_implicit_gemm_2,
)
from flexgemm.compat.flex_gemm.kernels.cuda.sampling import (
    hashmap_build_grid_sample_3d_nearest_neighbor_map,
    hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight,
)

# As FlexGEMM 1.0 and its forks call them.
hashmap_insert_cuda = hashmap_insert
hashmap_lookup_cuda = hashmap_lookup
hashmap_insert_3d_cuda = hashmap_insert_3d
hashmap_lookup_3d_cuda = hashmap_lookup_3d
hashmap_insert_3d_idx_as_val_cuda = hashmap_insert_3d_idx_as_val
hashmap_build_submanifold_conv_neighbour_map_cuda = hashmap_build_submanifold_conv_neighbour_map

__all__ = [
    "expand_unique_build_sparse_conv_out_coords",
    "hashmap_build_grid_sample_3d_nearest_neighbor_map",
    "hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight",
    "hashmap_build_sparse_conv_neighbour_map",
    "hashmap_build_sparse_conv_out_coords",
    "hashmap_build_submanifold_conv_neighbour_map",
    "hashmap_build_submanifold_conv_neighbour_map_cuda",
    "hashmap_insert",
    "hashmap_insert_3d",
    "hashmap_insert_3d_cuda",
    "hashmap_insert_3d_idx_as_val",
    "hashmap_insert_3d_idx_as_val_cuda",
    "hashmap_insert_cuda",
    "hashmap_lookup",
    "hashmap_lookup_3d",
    "hashmap_lookup_3d_cuda",
    "hashmap_lookup_cuda",
    "hilbert_decode",
    "hilbert_encode",
    "neighbor_map_post_process_for_masked_implicit_gemm_1",
    "neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd",
    "neighbor_map_post_process_for_masked_implicit_gemm_2",
    "z_order_decode",
    "z_order_encode",
]
