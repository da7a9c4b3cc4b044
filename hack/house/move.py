"""Moves Rust files between folders and crates and follows every path to them.

    move.py MAP        a line a file:  old crate and module  new crate and module, as krypton_agent::fence krypton_runtime::lease

A module that has no line goes with the nearest above it. Crates are the folders below; a new crate needs its Cargo.toml
and lib.rs before. Declarations (`mod x;`) move along; a lib.rs keeps its own words."""
import os, re, sys
import uses

CRATES = {l.split()[0]: l.split()[1] for l in open(os.path.join(os.path.dirname(__file__), 'crates.map')) if l.strip()}
ROOTS = sorted(set(v.split('/')[0] for v in CRATES.values()) | {'tests', 'fuzz', 'crds', 'proto'})

def rd(p): return open(p, encoding='utf8').read()
def wr(p, s):
    os.makedirs(os.path.dirname(p), exist_ok=True); open(p, 'w', encoding='utf8').write(s)

def module_of(path):
    """(crate, module segments) of a file below a crate's src."""
    for crate, folder in sorted(CRATES.items(), key=lambda kv: -len(kv[1])):
        if path.startswith(folder + '/src/'):
            rel = path[len(folder) + 5:-3].split('/')
            if rel[-1] in ('lib', 'main'): rel = rel[:-1]
            return crate, rel
    return None, None

def file_of(crate, mod): return f"{CRATES[crate]}/src/{'/'.join(mod)}.rs"

def sources():
    for root in ROOTS:
        for d, ds, fs in os.walk(root):
            ds[:] = [x for x in ds if x not in ('target', 'corpus')]
            for f in fs:
                if f.endswith('.rs'): yield os.path.join(d, f)

DECL = re.compile(r'((?:^[ \t]*(?:///[^\n]*|#\[[^\n]*\])\n)*)^[ \t]*((?:pub(?:\([^)]*\))? )?)mod (\w+);\n', re.M)

def main(map_path):
    table = {}
    for line in open(map_path):
        line = line.split('#')[0].split()
        if line: table[line[0]] = line[1]
    files = {}
    for path in sources():
        crate, mod = module_of(path)
        if crate and path != f'{CRATES[crate]}/src/main.rs' and '/src/bin/' not in path: files[path] = (crate, mod)
    old_mods = {'::'.join([c] + m): p for p, (c, m) in files.items()}

    def new_module(old):
        """Of an old module path, the new one."""
        segs = old.split('::')
        for n in range(len(segs), 0, -1):
            head = '::'.join(segs[:n])
            if head in table: return '::'.join([table[head]] + segs[n:])
        return old

    def is_module(p): return p in old_mods
    def change_abs(p):
        """New absolute path of an absolute old path to a module or an item; None when it stays."""
        segs = p.split('::')
        # Items with a line of their own.
        for n in range(len(segs), 0, -1):
            head = '::'.join(segs[:n])
            if head in table or (is_module(head)):
                new = '::'.join([new_module(head)] + segs[n:])
                return new
        return p

    moved = {}
    for path, (crate, mod) in files.items():
        old = '::'.join([crate] + mod)
        new = new_module(old) if mod else old
        if new != old: moved[path] = new
    inverse = {}
    for p, n in moved.items():
        assert n not in inverse, (n, p, inverse.get(n)); inverse[n] = p

    declarations = {}          # new parent -> [(attributes, visibility, name)]
    texts = {}
    for path in list(sources()):
        text = rd(path)
        crate, mod = files.get(path, (None, None))
        if crate is None:
            c, _ = module_of(path)
            # main.rs and src/bin are crates of their own; tests too.
            texts[path] = uses.rewrite(text, lambda p: (lambda n: n if n != p else None)(change_abs(p)) if p.split('::')[0] in CRATES else None,
                                       '|'.join(CRATES))
            continue
        old = '::'.join([crate] + mod)
        new = moved.get(path, old)
        new_crate = new.split('::')[0]

        def decl(m):
            attrs, vis, name = m.groups()
            if '#[path' in attrs: return m.group(0)
            child_old = old + '::' + name
            child_new = new_module(child_old)
            parent, _, leaf = child_new.rpartition('::')
            if parent == new:
                return m.group(0) if leaf == name else m.group(0).replace(f'mod {name};', f'mod {leaf};')
            declarations.setdefault(parent, []).append((attrs, vis, leaf))
            return ''
        text = DECL.sub(decl, text)

        def change(p):
            segs = p.split('::')
            if segs[0] == 'crate': absolute = '::'.join([crate] + segs[1:])
            elif segs[0] in ('super', 'self'):
                here = old.split('::')
                rest = list(segs)
                if rest[0] == 'self': rest = rest[1:]
                while rest and rest[0] == 'super':
                    here = here[:-1]; rest = rest[1:]
                if not here or not rest: return None
                absolute = '::'.join(here + rest)
                target = change_abs(absolute)
                there = new.split('::'); rest = list(segs)
                if rest[0] == 'self': rest = rest[1:]
                while rest and rest[0] == 'super': there = there[:-1]; rest = rest[1:]
                if '::'.join(there + rest) == target: return None
                t = target.split('::')
                return '::'.join(['crate'] + t[1:]) if t[0] == new_crate else target
            elif segs[0] in CRATES: absolute = p
            else: return None
            t = change_abs(absolute).split('::')
            out = '::'.join(['crate'] + t[1:]) if t[0] == new_crate else '::'.join(t)
            return out if out != p else None
        if new != old or any(f in text for f in ('crate::', 'super::', 'krypton_')):
            # In an inline module `super` is this file: those stay.
            k = re.search(r'^(?:#\[cfg\(test\)\]\n)?mod tests \{', text, re.M)
            top, inner = (text[:k.start()], text[k.start():]) if k else (text, '')
            top = uses.rewrite(top, change, 'crate|super|' + '|'.join(CRATES))
            if inner:
                def within(p):
                    if p.startswith('super::super::'):
                        n = change(p[7:]); return n
                    if p.startswith(('super', 'self')): return None
                    return change(p)
                inner = uses.rewrite(inner, within, 'crate|super|' + '|'.join(CRATES))
            text = top + inner
        texts[path] = text

    # All leave before any arrives: one may take another's place.
    arrived = {}
    for path, new in sorted(moved.items()):
        segs = new.split('::')
        os.remove(path)
        arrived[file_of(segs[0], segs[1:])] = texts.pop(path)
    texts.update(arrived)
    for path, text in texts.items():
        if not os.path.exists(path) or rd(path) != text: wr(path, text)
    for parent, decls in sorted(declarations.items()):
        segs = parent.split('::')
        path = file_of(segs[0], segs[1:]) if len(segs) > 1 else f'{CRATES[segs[0]]}/src/lib.rs'
        text = rd(path) if os.path.exists(path) else ''
        lines = ''.join(f'{a}{v}mod {n};\n' for a, v, n in sorted(decls, key=lambda d: d[2]))
        found = list(DECL.finditer(text))
        if found: at = found[-1].end()
        else:
            m = re.match(r'(?://![^\n]*\n)*\n?', text); at = m.end()
        if not text: print('no file for', parent, [d[2] for d in decls])
        wr(path, text[:at] + lines + ('' if found else '\n') + text[at:])

main(sys.argv[1])
