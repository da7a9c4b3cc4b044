//! Bytes from a Secret, read under each policy in turn.

#![no_main]

use krypton_common::kubeconfig::Policy;
use krypton_common::kubeconfig::fuzzing::{broken_promise, policy_of};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // A policy that stays the same for the same input.
    let bits = bytes
        .iter()
        .fold(0_u8, |bits, byte| bits.rotate_left(3) ^ byte);
    for policy in [Policy::default(), policy_of(bits), policy_of(u8::MAX)] {
        if let Some(broken) = broken_promise(bytes, &policy) {
            panic!("{policy:?}: {broken}");
        }
    }
});
