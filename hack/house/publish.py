"""Makes public what other crates import of a crate below them. publish.py CHECKOUT"""
import sys,os,re; sys.path.insert(0,'hack/house'); import uses
os.chdir(sys.argv[1])
CR={'krypton_types':'common/types','krypton_runtime':'common/runtime','krypton_helm':'common/helm','krypton_reconciler':'common/reconciler'}
need=set()
for r in ('common','agent','hub','tests','fuzz','proto'):
    for d,ds,fs in os.walk(r):
        ds[:]=[x for x in ds if x not in('target','corpus')]
        for f in fs:
            if not f.endswith('.rs'): continue
            p=os.path.join(d,f); s=open(p).read()
            paths=[]
            for m in uses.USE.finditer(s): paths+= [x for x,_ in uses.flatten(m.group(3))]
            paths+=re.findall(r'(?<![\w:$])((?:krypton_\w+)(?:::\w+)+)',s)
            for q in paths:
                c=q.split('::')[0]
                if c in CR and not p.startswith(CR[c]+'/src'): need.add(q)
n=0
for q in sorted(need):
    segs=q.split('::'); c=segs[0]; base=CR[c]+'/src/'
    # make each module on the way pub
    for k in range(1,len(segs)):
        parent=segs[1:k]; name=segs[k]
        f=base+('/'.join(parent)+'.rs' if parent else 'lib.rs')
        if not os.path.exists(f): break
        s=open(f).read()
        t=re.sub(r'^(\s*)(?:pub\((?:crate|super)\) )?mod %s;'%name, r'\1pub mod %s;'%name, s, flags=re.M) if os.path.exists(base+'/'.join(segs[1:k+1])+'.rs') else s
        t=re.sub(r'^pub\((?:crate|super)\) ((?:const |async |unsafe )?(?:fn|struct|enum|const|static|trait|type) %s\b)'%name, r'pub \1', t, flags=re.M)
        t2=t
        if t2!=s: open(f,'w').write(t2); n+=1; print(q)
    # re-exports: pub(crate) use x::{...Name...}
    name=segs[-1]; parent=segs[1:-1]
    f=base+('/'.join(parent)+'.rs' if parent else 'lib.rs')
    if os.path.exists(f):
        s=open(f).read()
        def ex(m):
            body=m.group(1)
            return m.group(0).replace('pub(crate) use','pub use') if re.search(r'\b%s\b'%name,body) else m.group(0)
        t=re.sub(r'^pub\(crate\) use ([^;]*);',ex,s,flags=re.M)
        if t!=s: open(f,'w').write(t); print('reexport',q)
print(n)
