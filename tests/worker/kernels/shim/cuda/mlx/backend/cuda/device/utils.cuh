// MLX's helpers of this name: none is used but the two types that describe an array.
#pragma once
