"""Weights go to their place tensor by tensor: there is no second copy of the model, whatever its shards and dtype."""

import json
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ddtree.models.weights import SafetensorsSource, fill

NUM_TENSORS, SHAPE = 24, (1024, 2048)  # 8 MiB each in float32
TENSOR_BYTES = 4 * SHAPE[0] * SHAPE[1]
AT_ONCE = 4  # readers


def private_bytes() -> int:
    """Memory of this process that no file backs."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


class Peak:
    """The most private memory while it is open, beyond what there was before."""

    def __enter__(self):
        self.before, self.most, self._done = private_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.most = max(self.most, private_bytes() - self.before)

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_copy_of_a_sharded_model(tmp_path, dtype):
    names = [f"layer.{i}" for i in range(NUM_TENSORS)]
    weight_map = {name: f"shard-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: torch.full(SHAPE, float(i)).to(dtype) for i, n in enumerate(names) if weight_map[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    places = {name: torch.full(SHAPE, -1.0) for name in names}  # written to, so that they are there already
    with Peak() as peak:
        fill(places.items(), SafetensorsSource(tmp_path))
    assert all(place[0, 0] == i and place[-1, -1] == i for i, place in enumerate(places.values()))
    assert peak.most < (AT_ONCE + 2) * TENSOR_BYTES < NUM_TENSORS * TENSOR_BYTES / 3
