//! Which lead has written an object: one that finds a later one's mark does not write over it.
//!
//! With the resourceVersion that a write rests on, the look and the write are one step.

/// No hub comes this far: a greater number was not written by one, and says nothing.
const LATEST: u64 = 1 << 53;

/// What is to be done about an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Write,
    /// Whoever led in this epoch did so after us.
    Overtaken(u64),
}

/// `recorded` is the epoch on the object; a CRD that is older than this hub keeps none.
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
