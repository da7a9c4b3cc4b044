#!/usr/bin/env bash
# Makes four crates out of common and agent. Then the compiler says what has to be public, and ARCHITECTURE.md follows.
set -e
for c in types runtime helm reconciler; do mkdir -p common/$c/src; echo "//! $c" > common/$c/src/lib.rs; done
python3 hack/house/move.py hack/house/crates.moves
rm -f common/src/lib.rs; git mv common/Cargo.toml common/types/Cargo.toml; rmdir common/src 2>/dev/null || find common/src
git mv agent/src/chart/range/masterminds.tsv common/helm/src/chart/range/ 2>/dev/null || { mkdir -p common/helm/src/chart/range; git mv agent/src/chart/range/masterminds.tsv common/helm/src/chart/range/; }
mkdir -p common/helm/tests; git mv agent/tests/helm_driver.rs common/helm/tests/driver.rs; git mv agent/tests/helm_driver common/helm/tests/driver
printf '' > common/runtime/src/fuzzing.rs
python3 hack/house/crates_step.py
mkdir -p agent/src/args; mv common/runtime/src/args/page.rs agent/src/args/page.rs; rmdir common/runtime/src/args 2>/dev/null || true
printf '//! What both command lines share.\n\npub mod go_values;\n' > common/runtime/src/args.rs
find agent common -type d -empty -delete
python3 hack/house/bare.py hack/house/crates.moves
python3 hack/house/imported.py hack/house/crates.moves
sed -i 's#cat Cargo.lock Cargo.toml \*/Cargo.toml fuzz/Cargo.lock#cat Cargo.lock Cargo.toml {common/*,*}/Cargo.toml fuzz/Cargo.lock#' hack/deps-cache.sh
sed -i '/let (crate_name, _) = of/d; s/{crate_name}\/src/{of}\/src/' common/types/src/fuzzing.rs
sed -i 's/^use krypton_agent::args::Flags;/use super::Flags;/' agent/src/args/page.rs
python3 - <<'P'
s=open('agent/src/args.rs').read()
i=s.index('\nuse '); s=s[:i]+'\n#[cfg(test)]\nmod page;\n'+s[i:]; open('agent/src/args.rs','w').write(s)
P
python3 hack/house/publish.py .
cargo fmt --all
sed -i 's/use krypton_agent::archive_promises/use super::super::archive_promises/' common/helm/src/chart/archive.rs
sed -i 's/krypton_common=debug/krypton_runtime=debug/' common/runtime/src/telemetry/level.rs
python3 - <<'P'
def sub(p,*ab):
    s=open(p).read()
    for a,b in ab:
        assert a in s,(p,a); s=s.replace(a,b)
    open(p,'w').write(s)
sub('tests/tests/e2e/docs.rs',
 ('''        "common/src/conditions.rs",''','''        "common/types/src/conditions.rs",'''))
sub('tests/tests/e2e/docs_commands.rs',('"agent/src/flags"','"agent/src/args"'))
sub('tests/tests/e2e/failpoints.rs',('''    let tables: [(&str, &[&str]); 2] = [("agent", &EFFECTS), ("hub", &EFFECTS_OF_THE_HUB)];
    for (name, table) in tables {
        let mut found = Vec::new();
        placed(&root.join(name).join("src"), &mut found);
        found.sort();
        assert_eq!(found, table, "{name}");
    }
''','''    let tables: [(&[&str], &[&str]); 2] = [
        (&["common", "agent/src"], &EFFECTS),
        (&["hub/src"], &EFFECTS_OF_THE_HUB),
    ];
    for (folders, table) in tables {
        let mut found = Vec::new();
        for folder in folders {
            placed(&root.join(folder), &mut found);
        }
        found.sort();
        assert_eq!(found, table, "{folders:?}");
    }
'''))
sub('docs/faults.md',('../agent/src/failpoint.rs','../common/runtime/src/failpoint.rs'))
sub('docs/repair.md',('`agent/src/plan/repair.rs`','`common/reconciler/src/plan/repair.rs`'))
sub('docs/agent-flags.md',('agent/src/flags.rs','agent/src/args.rs'))
sub('agent/src/args/page.rs',('agent/src/flags.rs','agent/src/args.rs'))
sub('docs/logs.md',('krypton_agent::reconciler=debug','krypton_reconciler=debug'))
sub('tests/docs/commands.yaml',('krypton_agent::reconciler=debug','krypton_reconciler=debug'))
P
cargo fmt --all
