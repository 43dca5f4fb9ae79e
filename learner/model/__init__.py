"""The learner's model on Megatron-core: the only place that imports megatron."""

import warnings

# megatron says on every import what is normal on a CPU, and calls what this torch release is about to rename.
warnings.filterwarnings(
    "ignore", message=".*(Apex|Transformer Engine|cuda_graph_scope|full scope)", category=UserWarning
)
warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning)
warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"`load_state_dict` is deprecated", category=FutureWarning)
