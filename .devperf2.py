import sys; sys.path.insert(0,'src')
import time, torch, os, numpy as np, random, timeit
from penstock.order.randomness import SampleRandomness
torch.set_num_threads(1)
def t(f, n=300):
    f(); s=time.perf_counter()
    for _ in range(n): f()
    return (time.perf_counter()-s)/n*1e6
b=SampleRandomness(1,0)
pos=[0]
def seed64():
    p=pos[0]
    for i in range(64): b(p+i,64-i)
    pos[0]+=128
print("seed/sample us", t(seed64)/64)
def full64():
    for i in range(64): torch.full((4,), float(i))
print("full/sample us", t(full64)/64)
def both():
    p=pos[0]
    for i in range(64): b(p+i,64-i); torch.full((4,), float(i))
    pos[0]+=128
print("both/sample us", t(both)/64)
for s in ["np.random.seed(5)","random.seed(2**60+1)","torch.default_generator.manual_seed(5)","torch.full((4,),1.0)"]:
    print(s, min(timeit.repeat(s,globals=globals(),number=3000,repeat=5))/3000*1e6)
ph=np.random.Philox(key=np.array([1,2],dtype=np.uint64),counter=0)
print("raw16", t(lambda: ph.random_raw(320*16))/16, "adv", t(lambda: ph.advance(80*16)))
g=torch.default_generator
def inter():
    for i in range(64): np.random.seed(i); g.manual_seed(i)
print("np+torch", t(inter)/64)
