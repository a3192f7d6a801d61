import sys; sys.path.insert(0,'src')
import time, torch, os, ctypes, numpy as np
from penstock import DataLoader as P
from penstock.engine.delivery import Delivery
from penstock.engine.memory import SharedFile
class Big:
    def __len__(self): return 64*1500
    def __getitem__(self,i): return torch.full((3,224,224), i%255, dtype=torch.uint8)
busy={}; o=Delivery._take
def take(self,w,r): busy.setdefault(w,[]).append(r.busy_ns); o(self,w,r)
Delivery._take=take
def loader(**k):
    busy.clear()
    it=iter(P(Big(),batch_size=64,num_workers=2,**k)); 
    for i in range(200): next(it)
    busy.clear()
    flt=lambda: sum(int(open(f"/proc/{w.pid}/stat").read().split()[9]) for w in it._workers)
    f0=flt(); t=time.perf_counter()
    for i in range(800): next(it)
    el=time.perf_counter()-t
    print(k, "%.0f/s"%(800/el), "busy/batch ms %.2f"%(np.mean(sum(busy.values(),[]))/1e6), "faults/batch %.1f"%((flt()-f0)/800), "depth",it._delivery._depth,"slots",it._delivery._ring.num_slots, flush=True)
for k in (dict(randomness="worker"),dict(randomness="worker",prefetch_factor=2),dict(randomness="worker",prefetch_factor=1),dict(randomness="worker",prefetch_factor=2,multiprocessing_context="fork"),dict(prefetch_factor=2)): loader(**k)
torch.set_num_threads(1)
def bare(n, stride):
    m=SharedFile.create(); m.grow(n*stride); mm=m.map(0,n*stride)
    base=torch.frombuffer(mm,dtype=torch.uint8).data_ptr()
    def B(k):
        b=base+(k%n)*stride
        for i in range(64):
            t=torch.full((3,224,224),k%255,dtype=torch.uint8)
            ctypes.memmove(b+i*150528,t.data_ptr(),150528)
    def D(k):
        for i in range(64): t=torch.full((3,224,224),k%255,dtype=torch.uint8)
    for f in (B,D):
        for k in range(n+2): f(k)
        t=time.perf_counter()
        for k in range(200): f(k)
        print("bare",f.__name__,n,stride>>20,"ms/batch %.2f"%((time.perf_counter()-t)/200*1e3), flush=True)
for n in (1,4,8,16):
    for s in (12<<20, 64<<20): bare(n,s)
