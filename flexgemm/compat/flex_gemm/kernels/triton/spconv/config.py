"""flex_gemm.kernels.triton.spconv.config: read at each call."""

allow_tf32 = True  # of float32 convolutions, whatever torch's own setting
USE_ON_THE_FLY_WEIGHT_TRANSPOSE = True  # kept; flexgemm transposes no weights
