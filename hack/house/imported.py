"""After a move: `old::item` where the module was imported by its old name, and is now by its new one. imported.py MAP"""
import os, re, sys
import uses

LEAVES = {}
for line in open(sys.argv[1]):
    pair = line.split()
    if pair:
        old, new = (p.split('::')[-1] for p in pair)
        if old != new: LEAVES.setdefault(old, set()).add(new)
for root in ('common', 'agent', 'hub', 'kubectl', 'proto', 'tests', 'fuzz'):
    for d, ds, fs in os.walk(root):
        ds[:] = [x for x in ds if x not in ('target', 'corpus')]
        for f in fs:
            if not f.endswith('.rs'): continue
            p = os.path.join(d, f); s = open(p).read()
            have = set(re.findall(r'\bmod (\w+)\s*[;{]', s))
            for m in uses.USE.finditer(s):
                have |= {a or q.split('::')[-1] for q, a in uses.flatten(m.group(3))}
            t = s
            for old, news in LEAVES.items():
                if old in have: continue
                found = news & have
                if len(found) != 1: continue
                new = found.pop()
                pieces, last = [], 0
                for m in uses.USE.finditer(t):
                    pieces += [(t[last:m.start()], True), (m.group(0), False)]; last = m.end()
                pieces.append((t[last:], True))
                t = ''.join(re.sub(r"(?<![\w:.\"`$/'])%s(?=::[\w<{*])" % old, new, x) if live else x for x, live in pieces)
            if t != s:
                open(p, 'w').write(t); print(p)
