"""After a move: paths that begin with a child module's bare name (`use child::Item`). bare.py MAP"""
import re,sys,os
table={}
for l in open(sys.argv[1]):
    l=l.split()
    if l: table[l[0]]=l[1]
CR={l.split()[0]:l.split()[1] for l in open(os.path.join(os.path.dirname(__file__),'crates.map'))}
def new(o):
    s=o.split('::')
    for n in range(len(s),0,-1):
        h='::'.join(s[:n])
        if h in table: return '::'.join([table[h]]+s[n:])
    return o
for old,nw in table.items():
    parent,_,leaf=old.rpartition('::')
    np=new(parent); segs=np.split('::')
    f=f"{CR[segs[0]]}/src/"+('/'.join(segs[1:])+'.rs' if len(segs)>1 else 'lib.rs')
    if not os.path.exists(f) or '::' not in parent: continue
    nparent,_,nleaf=nw.rpartition('::')
    ns=nw.split('::')
    if nparent==np: repl=nleaf
    elif ns[0]==segs[0]: repl='crate::'+'::'.join(ns[1:])
    else: repl=nw
    if repl==leaf: continue
    s=open(f).read()
    t=re.sub(r'(?<![\w:."])%s(?=::[\w{*])'%leaf,repl,s)
    if t!=s: open(f,'w').write(t); print(f,leaf,'->',repl, len(re.findall(r'(?<![\w:."])%s(?=::[\w{*])'%leaf,s)))
