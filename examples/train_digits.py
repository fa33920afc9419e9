"""Trains a small network on handwritten digits that come from feedline's workers.

export FEEDLINE_DISPATCHER=grpc://127.0.0.1:7070
python examples/train_digits.py --checkpoint c.pt --stop-after 60    # saves in the middle of an epoch, and stops
python examples/train_digits.py --checkpoint c.pt --resume c.pt      # goes on with the next batch
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from feedline import DecodeImage, Normalize, Pipeline, RandomResizedCrop, RemoteDataLoader, Resize

SIDE = 28
MEAN, STD = (0.3,), (0.35,)
TRAIN = Pipeline([
    DecodeImage(mode="L"),
    RandomResizedCrop(SIDE, scale=(0.7, 1.0), ratio=(0.9, 1.1)),
    Normalize(mean=MEAN, std=STD),
])  # fmt: skip
TEST = Pipeline([DecodeImage(mode="L"), Resize((SIDE, SIDE)), Normalize(mean=MEAN, std=STD)])


def network() -> nn.Module:
    """Images float32 [batch, 1, 28, 28] -> logits float32 [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(args: argparse.Namespace) -> dict[str, object]:
    """One leg of training. Returns its figures."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = RemoteDataLoader(
        args.dispatcher, dataset=args.dataset, job=args.job, batch_size=args.batch_size, pipeline=TRAIN, seed=args.seed,
        epochs=args.epochs,
    )  # fmt: skip
    done = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        done = saved["steps"]

    first, rows, epoch = done, 0, -1
    with loader:
        total = len(loader)
        epoch_steps = total // args.epochs
        # off when this is not a terminal
        bar = tqdm(total=total, initial=done, unit="batch", desc="training", disable=None)
        start = time.perf_counter()
        for batch in loader:
            if done // epoch_steps != epoch:
                epoch = done // epoch_steps
                print(f"epoch {epoch} at step {done}", flush=True)
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["cls"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            rows += len(batch["__id__"])
            bar.update()
            bar.set_postfix(epoch=epoch, loss=f"{loss.item():.3f}", refresh=False)
            if done == args.stop_after:
                # the position is that of the last batch handed over: nothing that was fetched ahead counts
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": done}
                torch.save({**saved, "loader": loader.state_dict()}, args.checkpoint)
                break
        seconds = time.perf_counter() - start
        bar.close()
        stats = loader.stats()
    figures = {
        "first_step": first, "steps": done - first, "rows": rows, "seconds": seconds,
        "wait_share": stats["wait_share"], "finished": done == total,
    }  # fmt: skip
    if done == total:
        torch.save({"model": model.state_dict()}, args.checkpoint)
        figures["accuracy"] = accuracy(model, args)
    return figures


@torch.no_grad()
def accuracy(model: nn.Module, args: argparse.Namespace) -> float:
    """Share of the held-out digits that the model names right."""
    model.eval()
    right = rows = 0
    job = f"{args.job}-test"
    with RemoteDataLoader(
        args.dispatcher, dataset=args.test, job=job, batch_size=100, pipeline=TEST, shuffle=None
    ) as test:
        for batch in tqdm(test, total=len(test), unit="batch", desc="testing", disable=None):
            real = ~batch["__pad__"]
            right += int((model(batch["image"]).argmax(1) == batch["cls"])[real].sum())
            rows += int(real.sum())
    return right / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatcher", help="its address (default: $FEEDLINE_DISPATCHER)")
    parser.add_argument("--dataset", default="digits", help="training data, name[@version]")
    parser.add_argument("--test", default="digits-test", help="held-out data, name[@version]")
    parser.add_argument("--job", default="digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"), help="where model and position are saved")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="save there, and stop")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from what was saved")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures there as JSON")
    args = parser.parse_args()
    figures = train(args)
    print(json.dumps(figures))
    if args.report:
        args.report.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
