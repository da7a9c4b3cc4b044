//! Promises about every input. The fuzzer checks them on the inputs that it finds, and a test on the seeds.

use crate::args::go_values::parse_duration;
use std::time::Duration;

#[path = "../../../fuzz/shared.rs"]
mod shared;
use shared::{Target, promise};
/// By the names of the folders of seeds.
pub const TARGETS: &[(&str, Target)] = &[("durations", durations)];

/// A duration of Go.
pub fn durations(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let duration = parse_duration(&text)?;
    let longest = Duration::from_nanos(i64::MAX.unsigned_abs());
    promise!(
        duration <= longest,
        "{duration:?} is longer than Go's longest duration"
    );
    let (seconds, nanos) = (duration.as_secs(), duration.subsec_nanos());
    for text in [
        format!("{seconds}s{nanos}ns"),
        format!("{seconds}.{nanos:09}s"),
        format!(
            "{}h{}m{}s{nanos}ns",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60
        ),
    ] {
        let reparsed = parse_duration(&text);
        promise!(reparsed == Some(duration), "{text} is {reparsed:?}");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn each_seed_keeps_its_promises() {
        shared::replay(TARGETS);
    }
}
