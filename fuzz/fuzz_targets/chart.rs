//! Bytes from a repository, read as a packaged chart. The modules are the agent's own files: the whole of the
//! agent would take minutes to build.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code, unreachable_pub)]
#[path = "../../agent/src/chart/archive.rs"]
mod archive;
#[path = "../../agent/src/chart/archive_promises.rs"]
mod archive_promises;
#[allow(dead_code)]
#[path = "../../agent/src/chart/range.rs"]
mod range;
#[allow(dead_code, unreachable_pub)]
#[path = "../../agent/src/chart/version.rs"]
mod version;

fuzz_target!(|bytes: &[u8]| {
    if let Some(broken) = archive_promises::broken_promise(bytes) {
        panic!("{broken}");
    }
});
