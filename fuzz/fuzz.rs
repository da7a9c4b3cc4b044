//! Fuzzes the target that the variable `FUZZ_TARGET` names, until an input breaks a promise.

#![no_main]

use std::sync::LazyLock;

static TARGET: LazyLock<fn(&[u8]) -> Option<String>> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let all = [
        krypton_helm::fuzzing::TARGETS,
        krypton_hub::fuzzing::TARGETS,
        krypton_proto::fuzzing::TARGETS,
        krypton_reconciler::fuzzing::TARGETS,
        krypton_runtime::fuzzing::TARGETS,
        krypton_types::fuzzing::TARGETS,
    ];
    let target = all.concat().into_iter().find(|target| target.0 == name);
    target
        .unwrap_or_else(|| panic!("FUZZ_TARGET={name}: no fuzz target has this name"))
        .1
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(broken) = TARGET(bytes) {
        panic!("{broken}");
    }
});
