// MLX's text includes it and names the namespace; no kernel of ours uses more.
#pragma once
namespace cooperative_groups {}
