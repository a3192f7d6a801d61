"""YOLOv8n trained with Ultralytics on generated squares, without downloading weights or data.

    YOLO_OFFLINE=true penstock run --seed 0 --workers 2 examples/ultralytics_yolo.py squares

On a CPU, Ultralytics always sets workers to 0. --workers overrides it.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from ultralytics import YOLO

SIZE = 64


def draw_squares(folder: Path) -> Path:
    """Write images with one bright square each, labels, and a data.yaml for Ultralytics."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 64), ("val", 8)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image = rng.integers(0, 80, (SIZE, SIZE, 3), dtype=np.uint8)
            x, y = rng.integers(4, SIZE - 20, 2)
            image[y : y + 16, x : x + 16] = 220
            Image.fromarray(image).save(folder / "images" / part / f"{number}.png")
            box = f"0 {(x + 8) / SIZE} {(y + 8) / SIZE} {16 / SIZE} {16 / SIZE}\n"
            (folder / "labels" / part / f"{number}.txt").write_text(box)
    data = folder / "data.yaml"
    data.write_text(f"path: {folder.resolve()}\ntrain: images/train\nval: images/val\nnames: [x]\n")
    return data


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "squares").resolve()
    model = YOLO("yolov8n.yaml")
    model.train(
        data=draw_squares(folder),
        epochs=2,
        imgsz=SIZE,
        batch=4,
        close_mosaic=1,
        workers=2,
        device="cpu",
        project=folder / "runs",
        exist_ok=True,
        plots=False,
    )
    print("loss", *(loss.item() for loss in model.trainer.tloss.values()), flush=True)
