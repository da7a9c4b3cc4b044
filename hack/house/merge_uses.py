"""Puts the imports of our crates with those of others, and merges those of one module. merge_uses.py"""
import os, re, subprocess
import uses

EXTERN = re.compile(r'^use (krypton_\w+)::')

def key(stmt):
    body = stmt[len('use '):-1].strip()
    m = re.match(r'^([\w:]+)::\{([^{}]*)\}$', body, re.S)
    if m: return m.group(1), [x.strip() for x in m.group(2).split(',') if x.strip()]
    if '{' in body or body.endswith('*'): return None, None
    p, _, leaf = body.rpartition('::')
    return (p, [leaf]) if p else (None, None)

def region(s):
    """Spans of plain `use` statements at the top level, before the first other item."""
    out = []
    pos = 0
    stmt = re.compile(r'(?:pub(?:\([^)]*\))? )?use [^;]+;[ \t]*(?://[^\n]*)?\n')
    lines = re.compile(r'(?:[ \t]*\n|//[^\n]*\n|#!?\[[^\n]*\]\n|(?:pub(?:\([^)]*\))? )?mod \w+;\n)')
    attr = False
    while pos < len(s):
        m = stmt.match(s, pos)
        if m:
            out.append((m.start(), m.end(), m.group(0), attr)); pos = m.end(); attr = False; continue
        m = lines.match(s, pos)
        if not m: break
        attr = m.group(0).startswith(('#[', '//'))  and not m.group(0).startswith('//!')
        pos = m.end()
    return out

def fix(s):
    stmts = region(s)
    plain = [(a, b, t) for a, b, t, at in stmts if not at and t.startswith('use ') and '//' not in t]
    if not plain: return s
    groups = []          # runs without a blank line between
    for a, b, t in plain:
        if groups and groups[-1][-1][1] == a: groups[-1].append((a, b, t))
        else: groups.append([(a, b, t)])
    def kind(t):
        r = re.match(r'use (\w+)', t).group(1)
        return 'std' if r in ('std', 'core', 'alloc') else 'own' if r in ('crate', 'super', 'self') else 'ext'
    ext = next((g for g in groups if all(kind(t) == 'ext' for _, _, t in g) and any(re.match(r'use [a-z_0-9]+::', t) for _, _, t in g) and not is_child(g, s)), None)
    moved = [x for g in groups if g is not ext for x in g if EXTERN.match(x[2])]
    replace = {}
    def merged(items):
        by, keep, order = {}, [], []
        for t in items:
            k, leaves = key(t.rstrip('\n'))
            if k is None: order.append(t); continue
            if k not in by: by[k] = []; order.append(('m', k))
            for l in leaves:
                if l not in by[k]: by[k].append(l)
        # `use a::b;` beside `use a::b::{..}` is `self` there
        for k in list(by):
            parent, _, leaf = k.rpartition('::')
            if parent in by and leaf in by[parent]:
                by[parent].remove(leaf)
                if 'self' not in by[k]: by[k].insert(0, 'self')
        out = []
        for o in order:
            if isinstance(o, str): out.append(o); continue
            leaves = by[o[1]]
            if not leaves: continue
            if leaves == ['self']: out.append(f'use {o[1]};\n'); continue
            out.append(f'use {o[1]}::{leaves[0]};\n' if len(leaves) == 1 else f'use {o[1]}::{{{", ".join(leaves)}}};\n')
        return ''.join(out)
    for g in groups:
        items = [t for a, b, t in g if (a, b, t) not in moved]
        if g is ext: items += [t for _, _, t in moved]
        replace[(g[0][0], g[-1][1])] = merged(items)
    if ext is None and moved:
        block = merged([t for _, _, t in moved])
        g = groups[0]
        span = (g[0][0], g[-1][1])
        # after std, or before what is our own
        if kind(g[0][2]) == 'std': replace[span] = replace[span] + '\n' + block
        else: replace[span] = block + '\n' + replace[span]
    for (a, b), t in sorted(replace.items(), reverse=True):
        s = s[:a] + t + s[b:]
    return re.sub(r'\n{3,}', '\n\n', s)

def is_child(g, s):
    mods = set(re.findall(r'^(?:pub(?:\([^)]*\))? )?mod (\w+);', s, re.M))
    return any(re.match(r'use (\w+)', t).group(1) in mods for _, _, t in g)

if __name__ == '__main__':
    for root in ('common', 'agent', 'hub', 'kubectl', 'proto', 'tests'):
        for d, ds, fs in os.walk(root):
            ds[:] = [x for x in ds if x != 'target']
            for f in fs:
                if not f.endswith('.rs'): continue
                p = os.path.join(d, f); s = open(p).read(); t = fix(s)
                if t != s: open(p, 'w').write(t)
