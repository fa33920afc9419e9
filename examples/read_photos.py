"""Reads one epoch of photographs: decode, random crop, flip, normalise, all on the workers.

FEEDLINE_DISPATCHER=grpc://127.0.0.1:7070 python examples/read_photos.py
"""

from __future__ import annotations

import argparse
import json
import time

from feedline import DecodeImage, HorizontalFlip, Normalize, Pipeline, RandomResizedCrop, RemoteDataLoader, Select

PIPELINE = Pipeline([
    DecodeImage("jpg"),
    RandomResizedCrop(64),
    HorizontalFlip(),
    Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    Select(["image", "txt"]),
])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatcher", help="its address (default: $FEEDLINE_DISPATCHER)")
    parser.add_argument("--dataset", default="photos")
    parser.add_argument("--job", default="photos")
    args = parser.parse_args()
    rows, start = 0, time.perf_counter()
    with RemoteDataLoader(
        args.dispatcher, dataset=args.dataset, job=args.job, batch_size=32, pipeline=PIPELINE
    ) as loader:
        for batch in loader:
            # image: float32 [batch, 3, 64, 64]; txt: list of str
            rows += len(batch["txt"])
    print(json.dumps({"rows": rows, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
