// Replaces MLX's header of this name. kvd's kernels use only its `Shape` and `Strides`, which are in
// cuda.h.
#pragma once
