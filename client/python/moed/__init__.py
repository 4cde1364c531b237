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

A group may serve several models: `Client.models` has their names, `Client(..., model=NAME)` is a
client of that one.

Several at once: `Client.submit` and `Stream.submit` return futures, `AsyncClient` is for asyncio,
and `Client.open_regions` shares memory with a worker of this host.

Tensors: numpy arrays in, numpy arrays out; torch tensors in, torch tensors out. Others with
`__dlpack__` in the host's memory are taken too, and the answers are numpy arrays.

The extension `moed._native`, if it is installed, carries forward passes by libmoeclient. Without it
they go through grpcio, with the same answers.

Training: `Client.backward`, `Client.optimizer_step` and so on, if the workers train; and the module
`moed.torch`, which has to be imported separately and needs PyTorch.

Trust: a worker of the same user on this host is reached by its Unix socket. For others, `Client`
takes the files of TLS and of a token, or the environment has MOED_TLS_CA, MOED_TLS_CERTIFICATE,
MOED_TLS_KEY, MOED_TLS_SERVER_NAME and MOED_TOKEN_FILE.

Tensor files: `read_safetensors` and `write_safetensors`.
"""

from ._answers import (Checkpoint, CheckpointInfo, ForwardResult, Gradients, Layer, ServerInfo,
                       RegionAnswer, StepResult, TrainState)
from ._async import AsyncClient, AsyncStream
from ._client import Client
from ._device_regions import DeviceRegions, StreamRequest
from ._dtypes import bf16, f32
from ._errors import MoeError
from ._regions import RegionRequest, Regions
from ._safetensors import read_safetensors, write_safetensors
from ._stream import Stream
from ._version import __version__

__all__ = [
    "AsyncClient", "AsyncStream", "Checkpoint", "CheckpointInfo", "Client", "DeviceRegions",
    "ForwardResult", "Gradients", "Layer", "MoeError", "RegionAnswer", "RegionRequest", "Regions",
    "ServerInfo", "StepResult", "Stream", "StreamRequest", "TrainState", "__version__", "bf16",
    "f32", "read_safetensors", "write_safetensors",
]
