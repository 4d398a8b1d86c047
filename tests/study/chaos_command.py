"""A command of `test_chaos.py`: gradient descent that saves each step, thinks for a while, and then prints its report.

So it is often killed when it has saved and not yet printed, and it never prints a report again.
"""

import json
import sys
import time
from pathlib import Path

lr, momentum, directory = float(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
kept = directory / "state.json"
step, x, speed = json.loads(kept.read_text()) if kept.exists() else (0, 10.0, 0.0)
while step < 9:
    time.sleep(0.12)
    speed = momentum * speed - lr * 2 * x
    step, x = step + 1, x + speed
    partial = kept.with_suffix(".partial")
    partial.write_text(json.dumps((step, x, speed)))
    partial.replace(kept)
    time.sleep(0.03)
    print(json.dumps({"loss": x * x, "step": step}), flush=True)
