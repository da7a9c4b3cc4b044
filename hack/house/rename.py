"""Renames whole words in Rust files. rename.py MAP [--check]

A row: scopes (path prefixes, by commas), old, new. Texts in quotes stay, but for names in braces. In comments a capitalised
name changes where it is quoted."""
import os, re, sys
rows = [l.rstrip('\n').split('\t') for l in open(sys.argv[1]) if l.strip() and not l.startswith('#')]
check = '--check' in sys.argv
TOKEN = re.compile(r'''(//[^\n]*|/\*(?:.|\n)*?\*/)|(r(\#*)"(?:.|\n)*?"\3|b?"(?:\\(?:.|\n)|[^"\\])*")|('(?:\\[^']+|[^'\\])')''')
def files():
    for root in ('common', 'agent', 'hub', 'kubectl', 'proto', 'tests', 'fuzz', 'crds'):
        for d, ds, fs in os.walk(root):
            ds[:] = [x for x in ds if x != "corpus" and os.path.join(d, x) != "target"]
            for f in fs:
                if f.endswith('.rs'): yield os.path.join(d, f)
for p in files():
    mine = [(o, n) for scopes, o, n in rows if any(p.startswith(x) for x in scopes.split(','))]
    if not mine: continue
    s = open(p).read()
    if check:
        for o, n in mine:
            k = len(re.findall(r'\b%s\b' % n, s))
            if k and re.search(r'\b%s\b' % o, s): print('there already:', p, n, k, 'beside', o)
        continue
    table = dict(mine)
    words = '|'.join(sorted(map(re.escape, table), key=len, reverse=True))
    word = re.compile(r'\b(%s)\b' % words)
    def code(t): return word.sub(lambda m: table[m.group(1)], t)
    def comment(t):
        def one(m):
            quoted = t[m.start()-1:m.start()] in '`[:(' and t[m.start()-1:m.start()] != '' and t[m.start()-1] in '`[:'
            return table[m.group(1)] if quoted or m.group(1)[0].islower() else m.group(0)
        return word.sub(one, t)
    def text(t): return re.sub(r'\{(%s)(?=[:}.])' % words, lambda m: '{' + table[m.group(1)], t)
    out, last = [], 0
    for m in TOKEN.finditer(s):
        out.append(code(s[last:m.start()]))
        out.append(comment(m.group(0)) if m.group(1) else text(m.group(0)) if m.group(2) else m.group(0))
        last = m.end()
    out.append(code(s[last:]))
    t = ''.join(out)
    if t != s: open(p, 'w').write(t)
