import os, time, torch, sys
print(sys.version, torch.__version__, torch.cuda.is_available(), len(os.listdir('/proc/self/task')))
import cloudpickle, psutil
print("cloudpickle", cloudpickle.__version__, "psutil", psutil.__version__)
try:
    import rich, typer; print("rich/typer ok")
except Exception as e: print("no", e)
import importlib
for m in ("pytest","hypothesis","pytest_timeout","torchvision"):
    try: importlib.import_module(m); print(m,"ok")
    except Exception as e: print(m, "missing", e)
x = torch.ones(3, device="cuda") # parent holds a context
sys.path.insert(0, "src")
from penstock import DataLoader
class D(torch.utils.data.Dataset):
    def __len__(self): return 640
    def __getitem__(self, i): return torch.full((3,224,224), i % 255, dtype=torch.uint8), i
f = lambda t: t
for kw in (dict(), dict(multiprocessing_context="spawn"), dict(pin_memory=True), dict(num_workers=0), dict(pool="thread"), dict(num_workers=8)):
    t = time.time()
    kw = {"num_workers": 4, **kw}
    n = 0
    for b, y in DataLoader(D(), batch_size=64, **kw):
        if n == 0: first = time.time() - t
        assert (b[:, 0, 0, 0].long() == y % 255).all(); n += len(y)
        g = b.cuda(non_blocking=kw.get("pin_memory", False))
    print(kw, n, "first %.3f total %.3f" % (first, time.time() - t), "pinned", b.is_pinned())
class C(torch.utils.data.Dataset):
    def __init__(self): self.inner = {"w": torch.ones(3, device="cuda")}
    def __len__(self): return 4
    def __getitem__(self, i): return i
try: next(iter(DataLoader(C(), num_workers=1)))
except Exception as e: print(type(e), e)
