// MLX's text includes this header and names the namespace. kvd's kernels use nothing from it.
#pragma once
namespace cooperative_groups {}
