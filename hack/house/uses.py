"""Rewrites Rust `use` statements and inline paths by a function old path -> new path."""
import re

USE = re.compile(r'^([ \t]*)((?:pub(?:\([^)]*\))? )?)use ([^;]+);', re.M)

def split_top(body):
    parts, depth, cur = [], 0, ''
    for ch in body:
        if ch == '{': depth += 1
        if ch == '}': depth -= 1
        if ch == ',' and depth == 0:
            parts.append(cur.strip()); cur = ''
        else:
            cur += ch
    if cur.strip(): parts.append(cur.strip())
    return [p for p in parts if p]

def flatten(tree, prefix=''):
    """Yields (path, alias); a path may end in '*'."""
    tree = tree.strip()
    m = re.match(r'^((?:[\w]+::|::)*)\{(.*)\}$', tree, re.S)
    if m:
        for part in split_top(m.group(2)):
            yield from flatten(part, prefix + m.group(1))
        return
    alias = None
    m = re.match(r'^(.*?)\s+as\s+(\w+)$', tree, re.S)
    if m: tree, alias = m.group(1), m.group(2)
    path = prefix + tree
    if path.endswith('::self'): path = path[:-6]
    yield path, alias

def show(leaf, alias): return leaf + (f' as {alias}' if alias else '')

def emit(indent, vis, items, nested):
    """items: list of (path, alias)."""
    if nested:
        roots = {}
        for path, alias in items:
            root, _, rest = path.partition('::')
            roots.setdefault(root, []).append((rest, alias))
        out = []
        for root, rests in roots.items():
            out.append(f'{indent}{vis}use {tree(root, rests)};')
        return '\n'.join(out)
    parents = {}
    selfs = {p for p, a in items}
    for path, alias in items:
        parent, _, leaf = path.rpartition('::')
        if any(q.startswith(path + '::') for q in selfs):
            parents.setdefault(path, []).append(('self', alias)); continue
        parents.setdefault(parent, []).append((leaf, alias))
    out = []
    for parent, leaves in sorted(parents.items()):
        names = [show(*l) for l in leaves]
        if len(names) == 1 and not (leaves[0][0] == 'self'):
            out.append(f'{indent}{vis}use {parent + "::" if parent else ""}{names[0]};')
        elif len(names) == 1:
            out.append(f'{indent}{vis}use {parent}{" as "+leaves[0][1] if leaves[0][1] else ""};')
        else:
            out.append(f'{indent}{vis}use {parent}::{{{", ".join(names)}}};')
    return '\n'.join(out)

def tree(root, rests):
    if len(rests) == 1:
        rest, alias = rests[0]
        return show(root + ('::' + rest if rest else ''), alias)
    groups = {}
    for rest, alias in rests:
        head, _, tail = rest.partition('::')
        groups.setdefault(head, []).append((tail, alias))
    parts = []
    for head, tails in groups.items():
        if head == '': parts.append(show('self', tails[0][1]))
        else: parts.append(tree(head, tails))
    return root + '::{' + ', '.join(parts) + '}'

def rewrite(text, change, roots):
    """change(path) -> new path or None when it stays. roots: regex of first segments of inline paths."""
    def one(m):
        indent, vis, body = m.groups()
        items = list(flatten(body))
        new = [(change(p) or p, a) for p, a in items]
        if all(p == q for (p, _), (q, _) in zip(items, new)): return m.group(0)
        inner = re.search(r'\{(.*)\}', body, re.S)
        nested = bool(inner and '::' in inner.group(1)) and ('{' in body)
        return emit(indent, vis, new, nested)
    text = USE.sub(one, text)
    # Inline paths, outside of use statements and of comments' code alike.
    pieces, last = [], 0
    for m in USE.finditer(text):
        pieces.append((text[last:m.start()], True)); pieces.append((m.group(0), False)); last = m.end()
    pieces.append((text[last:], True))
    inline = re.compile(r'(?<![\w:$])((?:' + roots + r')(?:::\w+)+)')
    def path(m):
        segs = m.group(1).split('::')
        for n in range(len(segs), 1, -1):
            new = change('::'.join(segs[:n]))
            if new: return '::'.join([new] + segs[n:])
        return m.group(1)
    return ''.join(inline.sub(path, p) if live else p for p, live in pieces)
