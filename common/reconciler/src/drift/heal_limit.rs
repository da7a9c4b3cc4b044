//! Limits the corrections of an object that another client keeps changing.

use std::collections::BTreeMap;
use std::time::Duration;

use krypton_helm::releases::ObjectId;
use krypton_runtime::clock::BootTime;

/// Number of corrections without a pause. After that, the pause doubles with each correction.
const FREE: u32 = 3;
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
/// Number of good checks in a row after which the history is dropped.
const FORGIVEN: u32 = 6;
/// Maximum number of objects with a history in one release. Further objects are corrected at each check.
const MOST: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Past {
    heals: u32,
    last: BootTime,
    good: u32,
}

/// Correction history of the objects of one release.
#[derive(Clone, Debug, Default)]
pub(super) struct Guard(BTreeMap<ObjectId, Past>);

impl Guard {
    /// Returns true if an object that differs may be corrected now.
    pub(super) fn may_heal(
        &mut self,
        object: &ObjectId,
        interval: Duration,
        now: BootTime,
    ) -> bool {
        let Some(past) = self.0.get_mut(object) else {
            return true;
        };
        past.good = 0;
        let Some(beyond) = past.heals.checked_sub(FREE) else {
            return true;
        };
        let pause = interval.saturating_mul(2 << beyond.min(20)).min(LONGEST);
        now.since(past.last) >= pause
    }

    /// Records a correction or a failed attempt.
    pub(super) fn healed(&mut self, object: &ObjectId, now: BootTime) {
        let known = self.0.contains_key(object);
        if !known && self.0.len() >= MOST {
            return;
        }
        let past = self.0.entry(object.clone()).or_insert(Past {
            heals: 0,
            last: now,
            good: 0,
        });
        *past = Past {
            heals: past.heals.saturating_add(1),
            last: now,
            good: 0,
        };
    }

    /// Records a good check.
    pub(super) fn good(&mut self, object: &ObjectId) {
        if let Some(past) = self.0.get_mut(object) {
            past.good += 1;
            if past.good >= FORGIVEN {
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

    pub(super) fn at(looks: u32) -> BootTime {
        BootTime(INTERVAL * looks)
    }

    /// Returns the checks that correct the object, if it differs at the checks that `differs` selects.
    fn heals(differs: impl Fn(u32) -> bool, looks: u32) -> Vec<u32> {
        let (mut guard, mut heals) = (Guard::default(), Vec::new());
        for look in 0..looks {
            if !differs(look) {
                guard.good(&id());
            } else if guard.may_heal(&id(), INTERVAL, at(look)) {
                guard.healed(&id(), at(look));
                heals.push(look);
            }
        }
        heals
    }

    #[test]
    fn persistent_drift_backs_off_to_daily_correction() {
        assert_eq!(heals(|_| true, 40), [0, 1, 2, 4, 8, 16, 32]);
        let long = heals(|_| true, 2000);
        let last = long.last_chunk::<2>().unwrap();
        assert_eq!(last[1] - last[0], 144, "a day of ten minutes each");
    }

    #[test]
    fn occasional_drift_backs_off_and_rare_drift_resets() {
        let every_third = heals(|look| look % 3 == 0, 40);
        assert_eq!(every_third, [0, 3, 6, 9, 15, 24]);
        let rare = heals(|look| look % 7 == 0, 70);
        assert_eq!(rare.len(), 10);
    }

    #[test]
    fn the_memory_of_a_release_is_bounded() {
        let mut guard = Guard::default();
        for number in 0..MOST + 10 {
            let object = ObjectId {
                name: number.to_string(),
                ..id()
            };
            guard.healed(&object, at(0));
        }
        assert_eq!(guard.0.len(), MOST);
    }
}
