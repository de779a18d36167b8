"""One rank of an engine as a process: registers inherited memory and says so; ends when its stdin does.

python rank_process.py SOCKET ENGINE_ID RANK RANKS FD LAYERS BLOCKS LAYER_BYTES
"""

import sys

from kvevents_service.engine.layout import uniform_layers
from kvevents_service.engine.rank import RankClient, RankLayout
from kvevents_service.wire.control import Memory


def main() -> None:
    path, engine_id, *numbers = sys.argv[1:]
    rank, ranks, fd, layers, blocks, layer_bytes = map(int, numbers)
    memory = Memory(layers * blocks * layer_bytes)
    layout = RankLayout(engine_id, rank, ranks, [memory], uniform_layers(layers, blocks, layer_bytes), [fd])
    client = RankClient(path, layout)
    while not client.wait_connected(0.05) and not client.last_error:
        pass
    print("registered" if client.connected else client.last_error, flush=True)
    sys.stdin.read()
    print("gone" if client.close(10.0) else "not let go", flush=True)


main()
