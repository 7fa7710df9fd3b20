"""flex_gemm.kernels.triton.spconv.config: read at each call."""

allow_tf32 = True  # of float32 convolutions, whatever torch's own setting
