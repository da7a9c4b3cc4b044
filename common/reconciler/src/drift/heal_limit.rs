//! Limits the corrections of an object that another client keeps changing.

use std::collections::BTreeMap;
use std::time::Duration;

use krypton_helm::releases::ObjectId;
use krypton_runtime::clock::BootTime;

/// Number of corrections without a pause. After that, the pause doubles with each correction.
const FREE_HEALS: u32 = 3;
const MAX_PAUSE: Duration = Duration::from_secs(24 * 60 * 60);
/// Number of checks in a row without a difference after which the history is dropped.
const FORGET_AFTER: u32 = 6;
/// Maximum number of objects with a history in one release. Further objects are corrected at each check.
const MAX_OBJECTS: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HealHistory {
    heals: u32,
    last_heal: BootTime,
    /// Number of checks in a row without a difference.
    matches: u32,
}

/// Correction history of the objects of one release.
#[derive(Clone, Debug, Default)]
pub(super) struct HealLimiter(BTreeMap<ObjectId, HealHistory>);

impl HealLimiter {
    /// Returns true if an object that differs may be corrected now.
    pub(super) fn may_heal(
        &mut self,
        object: &ObjectId,
        interval: Duration,
        now: BootTime,
    ) -> bool {
        let Some(history) = self.0.get_mut(object) else {
            return true;
        };
        history.matches = 0;
        let Some(excess) = history.heals.checked_sub(FREE_HEALS) else {
            return true;
        };
        let pause = interval.saturating_mul(2 << excess.min(20)).min(MAX_PAUSE);
        now.since(history.last_heal) >= pause
    }

    /// Records a correction or a failed attempt.
    pub(super) fn record_heal(&mut self, object: &ObjectId, now: BootTime) {
        let heals = self.0.get(object).map_or(0, |history| history.heals);
        if heals == 0 && self.0.len() >= MAX_OBJECTS {
            return;
        }
        let history = HealHistory {
            heals: heals.saturating_add(1),
            last_heal: now,
            matches: 0,
        };
        self.0.insert(object.clone(), history);
    }

    /// Records a check that found no difference.
    pub(super) fn record_match(&mut self, object: &ObjectId) {
        if let Some(history) = self.0.get_mut(object) {
            history.matches += 1;
            if history.matches >= FORGET_AFTER {
                self.0.remove(object);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(600);

    fn id() -> ObjectId {
        ObjectId {
            api_version: "v1".to_owned(),
            kind: "ConfigMap".to_owned(),
            namespace: None,
            name: "a".to_owned(),
        }
    }

    pub(super) fn at(checks: u32) -> BootTime {
        BootTime(INTERVAL * checks)
    }

    /// Returns the checks that correct the object, if it differs at the checks that `differs` selects.
    fn heals(differs: impl Fn(u32) -> bool, checks: u32) -> Vec<u32> {
        let (mut limiter, mut heals) = (HealLimiter::default(), Vec::new());
        for check in 0..checks {
            if !differs(check) {
                limiter.record_match(&id());
            } else if limiter.may_heal(&id(), INTERVAL, at(check)) {
                limiter.record_heal(&id(), at(check));
                heals.push(check);
            }
        }
        heals
    }

    #[test]
    fn persistent_drift_backs_off_to_daily_correction() {
        assert_eq!(heals(|_| true, 40), [0, 1, 2, 4, 8, 16, 32]);
        let checks = heals(|_| true, 2000);
        let last = checks.last_chunk::<2>().unwrap();
        assert_eq!(last[1] - last[0], 144, "a day of ten minutes each");
    }

    #[test]
    fn occasional_drift_backs_off_and_rare_drift_resets() {
        let every_third = heals(|check| check % 3 == 0, 40);
        assert_eq!(every_third, [0, 3, 6, 9, 15, 24]);
        let rare = heals(|check| check % 7 == 0, 70);
        assert_eq!(rare.len(), 10);
    }

    #[test]
    fn the_memory_of_a_release_is_bounded() {
        let mut limiter = HealLimiter::default();
        for number in 0..MAX_OBJECTS + 10 {
            let object = ObjectId {
                name: number.to_string(),
                ..id()
            };
            limiter.record_heal(&object, at(0));
        }
        assert_eq!(limiter.0.len(), MAX_OBJECTS);
    }
}
