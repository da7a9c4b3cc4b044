"""Moves methods of one impl block, and free functions, into child modules, with the imports that they name.

split_impl.py FILE TYPE CHILD=method,method,+function ... ; a CHILD is made with `//! CHILD` as its first line."""
import os, re, sys
import uses
path, typ = sys.argv[1:3]
s = open(path).read()
folder = path[:-3]
imports = []
top = s.split('\nimpl ')[0]
for m in uses.USE.finditer(s):
    if m.group(1) == '' and m.start() < s.index('\nconst ' if '\nconst ' in s else '\nimpl '):
        imports += list(uses.flatten(m.group(3)))
def method(name, indent):
    global s
    m = re.search(r'^%s(?:pub(?:\([^)]*\))? )?(?:const )?(?:async )?fn %s\b' % (indent, name), s, re.M)
    assert m, name
    start = m.start()
    lines = s[:start].split('\n')
    k = len(lines) - 1
    while k > 0 and re.match(r'^%s(///|#\[)' % indent, lines[k - 1]): k -= 1
    start = len('\n'.join(lines[:k])) + (1 if k else 0)
    end = s.index('\n%s}\n' % indent, m.start()) + len(indent) + 3
    t = s[start:end]
    s = s[:start].rstrip('\n') + '\n\n' + s[end:].lstrip('\n')
    return t
made = []
for spec in sys.argv[3:]:
    child, names = spec.split('=')
    methods, functions = [], []
    for n in names.split(','):
        if n.startswith('+'): functions.append(method(n[1:], ''))
        else: methods.append(method(n, '    '))
    vis = 'pub(super) '
    methods = [re.sub(r'^    (?:pub(?:\([^)]*\))? )?((?:async )?fn )', lambda m: '    ' + vis + m.group(1), t, count=1, flags=re.M) for t in methods]
    body = f'impl {typ} {{\n' + '\n'.join(methods) + '}\n' if methods else ''
    body += ''.join('\n' + f for f in functions)
    words = set(re.findall(r'\w+', re.sub(r'//[^\n]*', '', body)))
    own = set(re.findall(r'\bfn (\w+)', body))
    used = []
    for p, a in imports:
        leaf = a if a and a != '_' else p.split('::')[-1]
        if p.split('::')[0] in ('self',): p = 'super::' + p[6:]
        elif p.startswith('super::'): p = 'super::' + p
        if leaf in words or a == '_' or leaf.endswith('Ext'): used.append(f'use {p}' + (f' as {a}' if a else '') + ';')
    # What the parent defines.
    defined = set(re.findall(r'^(?:pub(?:\([^)]*\))? )?(?:async )?(?:fn|struct|enum|const|type|static) (\w+)', s, re.M))
    kids = set(re.findall(r'^(?:pub(?:\([^)]*\))? )?mod (\w+);', s, re.M))
    sup = sorted((defined & words - own) | {k for k in kids if re.search(r'(?<![\w:.])%s::' % k, body)} | {typ})
    used.append('use super::{%s};' % ', '.join(sup))
    os.makedirs(folder, exist_ok=True)
    f = f'{folder}/{child}.rs'
    old = open(f).read() if os.path.exists(f) else f'//! {child}\n\n' 
    open(f, 'w').write(old + '\n'.join(used) + '\n\n' + body)
    made.append(child)
decl = re.search(r'^(?:pub(?:\([^)]*\))? )?mod \w+;\n', s, re.M)
lines = ''.join(f'mod {c};\n' for c in made)
if decl: s = s[:decl.start()] + lines + s[decl.start():]
else:
    m = re.match(r'(?://![^\n]*\n)*\n?', s); s = s[:m.end()] + lines + '\n' + s[m.end():]
open(path, 'w').write(s)
