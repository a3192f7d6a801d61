import sys; sys.path.insert(0,'src')
import time, torch, os, numpy as np
from penstock import DataLoader as P
from torch.utils.data import DataLoader as T
from penstock.engine.delivery import Delivery
class Tiny:
    def __len__(self): return 64*6000
    def __getitem__(self,i): return torch.full((4,), float(i))
busy={}; o=Delivery._take
def take(self,w,r): busy.setdefault(w,[]).append(r.busy_ns); o(self,w,r)
Delivery._take=take
def loader(cls,w=2,**k):
    busy.clear()
    it=iter(cls(Tiny(),batch_size=64,num_workers=w,**k)); 
    for i in range(200): next(it)
    busy.clear(); t=time.perf_counter(); c=time.process_time()
    for i in range(2000): next(it)
    el=time.perf_counter()-t; c=time.process_time()-c
    d=getattr(it,"_delivery",None)
    print(cls.__module__,w,k, "%.0f/s"%(2000/el), "busy/batch us %.0f"%(np.mean(sum(busy.values(),[]) or [0])/1e3), "parent cpu us/batch %.0f"%(c/2000*1e6), d and d._depth, flush=True)
for r in range(2):
    loader(T); loader(P); loader(P,randomness="worker"); loader(P,multiprocessing_context="fork"); loader(P,w=1,randomness="worker"); loader(T,w=0); loader(P,w=0); loader(P,w=0,randomness="worker")
