//! Judges claims of later desired states. A claim alone proves nothing, and following it causes a new desired
//! state for the whole fleet. After a restore of the home cluster, several members make the same claim.

use std::collections::BTreeMap;
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_types::names::SELF_CLUSTER;

/// Maximum number of epochs that a restored home cluster may lag behind: the number of hub starts since the
/// backup.
const EPOCHS_BEHIND: u64 = 10_000;
/// Delay after a followed claim before the member's next claim is followed. Doubles each time.
const CLAIM_BACKOFF: Duration = Duration::from_secs(20);
const CLAIM_BACKOFF_MAX: Duration = Duration::from_secs(6 * 60 * 60);
/// Time without a claim after which the delay starts from its first value.
const CLAIMS_FORGOTTEN: Duration = Duration::from_secs(24 * 60 * 60);

/// The later epoch that each Lease holder claims. `None` if its member runs an epoch issued by this hub.
#[derive(Debug, Default)]
pub(super) struct EpochClaims(BTreeMap<String, Option<u64>>);

/// Why the hub does not follow a claim yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimDelay {
    /// This member has claimed before and must wait.
    BackOff(BootTime),
    /// No other member confirms the claim.
    Unconfirmed(BootTime),
}

/// A member's claims of epochs that this hub has not issued.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ClaimHistory {
    followed: u32,
    not_before: BootTime,
    /// Start of the current claim that no other member confirms.
    unconfirmed_since: Option<BootTime>,
}

impl EpochClaims {
    /// Records a member's report: `None` from an observer or a silent member, otherwise its claim, if it has
    /// one.
    pub(super) fn record(&mut self, member: &str, report: Option<Option<u64>>) {
        // The home cluster's own record was restored with it, so it contradicts no claim.
        let counts = |claim: &Option<u64>| claim.is_some() || member != SELF_CLUSTER;
        match report.filter(counts) {
            Some(claim) => self.0.insert(member.to_owned(), claim),
            None => self.0.remove(member),
        };
    }

    /// Returns the latest epoch that members claim beyond `issued` and `known`, if this member claims one. Also
    /// returns whether a second member confirms it or no other member contradicts it.
    pub(super) fn latest_claim(
        &self,
        member: &str,
        issued: u64,
        known: u64,
    ) -> Option<(u64, bool)> {
        let is_plausible = |epoch: &u64| {
            *epoch > known && *epoch >= issued && epoch.saturating_sub(issued) <= EPOCHS_BEHIND
        };
        self.0.get(member)?.filter(is_plausible)?;
        let all = self.0.values();
        let claims: Vec<u64> = all.flatten().copied().filter(is_plausible).collect();
        let confirmed = claims.len() > 1 || self.0.values().all(Option::is_some);
        Some((claims.into_iter().max()?, confirmed))
    }
}

impl ClaimHistory {
    /// Decides whether the hub follows a claim now.
    pub(super) fn follow(&mut self, now: BootTime, confirmed: bool) -> Result<(), ClaimDelay> {
        if self.followed > 0 && now < self.not_before {
            return Err(ClaimDelay::BackOff(self.not_before));
        }
        if !confirmed {
            let since = *self.unconfirmed_since.get_or_insert(now);
            let at = since + CLAIM_BACKOFF_MAX;
            if now < at {
                return Err(ClaimDelay::Unconfirmed(at));
            }
        }
        self.unconfirmed_since = None;
        if now.since(self.not_before) >= CLAIMS_FORGOTTEN {
            self.followed = 0;
        }
        let delay =
            CLAIM_BACKOFF.saturating_mul(1_u32.checked_shl(self.followed).unwrap_or(u32::MAX));
        self.not_before = now + delay.min(CLAIM_BACKOFF_MAX);
        self.followed = self.followed.saturating_add(1).min(31);
        Ok(())
    }

    /// Records that the member makes no claim.
    pub(super) fn end_claim(&mut self) {
        self.unconfirmed_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 60 * 60;

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    #[test]
    fn claim_counts_with_a_second_member() {
        let mut claims = EpochClaims::default();
        claims.record("a", Some(Some(9)));
        assert_eq!(
            claims.latest_claim("a", 7, 0),
            Some((9, true)),
            "nobody contradicts"
        );
        claims.record(SELF_CLUSTER, Some(None));
        assert_eq!(
            claims.latest_claim("a", 7, 0),
            Some((9, true)),
            "home was restored"
        );
        claims.record("b", Some(None));
        assert_eq!(claims.latest_claim("a", 7, 0), Some((9, false)));
        assert_eq!(claims.latest_claim("b", 7, 0), None);
        claims.record("c", Some(Some(8)));
        assert_eq!(claims.latest_claim("c", 7, 0), Some((9, true)));
        // An earlier epoch confirms nothing.
        claims.record("c", Some(Some(6)));
        assert_eq!(claims.latest_claim("a", 7, 0), Some((9, false)));
        claims.record("c", Some(Some(7 + EPOCHS_BEHIND + 1)));
        assert_eq!(claims.latest_claim("a", 7, 0), Some((9, false)));
        assert_eq!(claims.latest_claim("c", 7, 0), None);
        assert_eq!(claims.latest_claim("a", 7, 9), None, "it was followed");
        claims.record("b", None);
        assert_eq!(claims.latest_claim("a", 7, 0), Some((9, true)));
    }

    #[test]
    fn lone_claim_waits_six_hours() {
        let mut claims = ClaimHistory::default();
        let due = Err(ClaimDelay::Unconfirmed(at(100 + 6 * HOUR)));
        assert_eq!(claims.follow(at(100), false), due);
        assert_eq!(claims.follow(at(100 + 5 * HOUR), false), due);
        // An interrupted claim starts again.
        claims.end_claim();
        let due = at(100 + 12 * HOUR);
        assert_eq!(
            claims.follow(at(100 + 6 * HOUR), false),
            Err(ClaimDelay::Unconfirmed(due))
        );
        assert_eq!(claims.follow(due, false), Ok(()));
        let again = due + CLAIM_BACKOFF;
        assert_eq!(claims.follow(due, true), Err(ClaimDelay::BackOff(again)));
        assert_eq!(claims.follow(again, true), Ok(()));
    }
}
