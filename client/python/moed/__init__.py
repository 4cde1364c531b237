# SPDX-License-Identifier: Apache-2.0
"""moed: Python client of the expert-parallel MoE daemon.

    import moed, numpy as np

    client = moed.Client("127.0.0.1:7600")
    layer = client.layers[0]
    x = np.random.randn(16, layer.hidden).astype(np.float32)
    y = client.forward(layer.layer, x)

Shapes: T tokens, H hidden width, K experts per token; arrays are row-major.

bfloat16: numpy has no such dtype. If the package ml_dtypes is installed, moed uses its bfloat16;
otherwise a BF16 tensor is a numpy array of uint16 with the bits. Every function accepts both, and
the answer has the dtype of the input. `bf16` and `f32` convert.

Training: `Client.backward`, `Client.optimizer_step` and so on, if the workers train; and the module
`moed.torch`, which has to be imported separately and needs PyTorch.

Trust: a worker of the same user on this host is reached by its Unix socket. For others, `Client`
takes the files of TLS and of a token, or the environment has MOED_TLS_CA, MOED_TLS_CERTIFICATE,
MOED_TLS_KEY, MOED_TLS_SERVER_NAME and MOED_TOKEN_FILE.

Tensor files: `read_safetensors` and `write_safetensors`.
"""

from ._answers import (Checkpoint, CheckpointInfo, ForwardResult, Gradients, Layer, ServerInfo,
                       StepResult, TrainState)
from ._client import Client, Stream
from ._dtypes import bf16, f32
from ._errors import MoeError
from ._safetensors import read_safetensors, write_safetensors
from ._version import __version__

__all__ = [
    "Checkpoint", "CheckpointInfo", "Client", "ForwardResult", "Gradients", "Layer", "MoeError",
    "ServerInfo", "StepResult", "Stream", "TrainState", "__version__", "bf16", "f32",
    "read_safetensors", "write_safetensors",
]
