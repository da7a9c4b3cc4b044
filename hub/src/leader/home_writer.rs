//! Prevents an earlier leader from overwriting objects that a later leader has written.
//!
//! Together with the write's resourceVersion, the check and the write are atomic.

/// Upper bound for epochs. A hub never writes a greater number, so such a number is ignored.
const LATEST: u64 = 1 << 53;

/// Whether this hub may write an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Write,
    /// A later leader, with this epoch, has written the object.
    Overtaken(u64),
}

/// Judges the epoch `recorded` on the object. An older CRD stores none.
pub(super) fn verdict(ours: u64, recorded: Option<u64>) -> Verdict {
    match recorded {
        Some(theirs) if theirs > ours && theirs < LATEST => Verdict::Overtaken(theirs),
        _ => Verdict::Write,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_leader_writes_are_not_overwritten() {
        let cases = [
            (None, Verdict::Write),
            (Some(6), Verdict::Write),
            (Some(7), Verdict::Write),
            (Some(8), Verdict::Overtaken(8)),
            (Some(LATEST - 1), Verdict::Overtaken(LATEST - 1)),
            (Some(LATEST), Verdict::Write),
            (Some(u64::MAX), Verdict::Write),
        ];
        for (recorded, expected) in cases {
            assert_eq!(verdict(7, recorded), expected, "{recorded:?}");
        }
    }
}
