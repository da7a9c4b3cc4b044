//! Manages the keys that the agent of a member may use: the current one, and the next one after a renewal.
//! Performs no I/O.
//!
//! The replicas of an agent share a key. One of them uses the next key first. The others follow when the hub
//! cuts their streams.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use krypton_crds::edge_cluster::{AgentKey, AgentKeys};
use krypton_types::conditions::{self, State, Truth};
use serde_json::{Value, json};

/// How long the current key stays valid after the first use of the next one.
const KEY_OVERLAP: SignedDuration = SignedDuration::from_mins(10);
/// How long an unused next key blocks another one. An agent waits as long for its certificate.
const RENEWAL_PENDING: SignedDuration = SignedDuration::from_secs(20);
/// After this time, a replaced key is in use by a second party. Before, it may belong to a replica that has not
/// followed yet.
const REPLACED_GRACE: SignedDuration = SignedDuration::from_mins(20);

/// Condition of an EdgeCluster: whether only one key of its agent is in use.
pub const ONE_KEY: &str = "AgentKeyUnique";

/// Reasons of the condition. The event uses the second one, too.
pub mod reason {
    pub const ONE: &str = "OneKeyInUse";
    pub const TWO: &str = "TwoKeysInUse";
}

/// How the hub treats an agent that uses a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyStatus {
    Valid,
    /// It was replaced a short time ago.
    Replaced,
    /// The hub issued it after all recorded keys, because the home cluster was restored from a backup.
    Newer,
    /// The record lacks it, or it was replaced long ago: two keys are in use.
    Unknown,
}

/// Why the hub doesn't renew a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRenewed {
    /// The agent must wait: the hub renewed the same key a short time ago.
    Renewing,
    /// The key is not recorded, because a later enrollment has voided it.
    Replaced,
}

/// The text of the refusal and of the event. It names no cluster UID, which would help a thief.
pub fn refusal(member: &str) -> String {
    format!(
        "the key of this agent's certificate is not recorded for member {member}: it was replaced, or its credential was copied; run 'kubectl krypton join {member}' and give the member's agent the new bundle, which voids all older keys"
    )
}

/// Returns the record after an enrollment. A new or replaced key voids all others, and another recorded key changes
/// nothing. An agent has a replaced key after the restore of its cluster.
pub fn enrolled(keys: Option<&AgentKeys>, key: AgentKey) -> AgentKeys {
    let is_key = |recorded: &AgentKey| recorded.key_sha256 == key.key_sha256;
    let stays_valid = |keys: &&AgentKeys| match &keys.next {
        Some(next) if is_key(next) => true,
        // The first use of the next key has replaced the current one.
        Some(next) if next.used.is_some() => false,
        _ => is_key(&keys.current),
    };
    match keys.filter(stays_valid) {
        Some(keys) => keys.clone(),
        None => AgentKeys {
            current: key,
            next: None,
        },
    }
}

fn contains_key(keys: &AgentKeys, key: &str) -> bool {
    let mut recorded = [&keys.current].into_iter().chain(&keys.next);
    recorded.any(|recorded| recorded.key_sha256 == key)
}

/// Whether the hub issued `key` after all recorded keys, or after the use of the key that replaced it. The hub records a
/// key before it sends the certificate, so such a record comes from a backup.
fn is_newer(keys: &AgentKeys, key: &AgentKey) -> bool {
    let since = |key: &AgentKey| key.since.as_ref().map(|since| since.0);
    let next = keys.next.as_ref();
    let newest = match contains_key(keys, &key.key_sha256) {
        false => since(&keys.current).max(next.and_then(since)),
        // Only an enrollment certifies a replaced key again, and it reinstates the key.
        true => next
            .filter(|next| next.key_sha256 != key.key_sha256)
            .and_then(|next| next.used.as_ref())
            .map(|used| used.0),
    };
    let after = |newest: Timestamp| newest.saturating_add(REPLACED_GRACE).ok();
    let after = newest.and_then(after);
    after.is_some_and(|after| since(key) > Some(after))
}

/// Returns whether the agent may use this key. Without a record it may use any.
pub fn key_status(keys: Option<&AgentKeys>, key: &AgentKey, now: Timestamp) -> KeyStatus {
    let Some(keys) = keys else {
        return KeyStatus::Valid;
    };
    let next = keys.next.as_ref();
    if next.is_some_and(|next| next.key_sha256 == key.key_sha256) {
        return KeyStatus::Valid;
    }
    if is_newer(keys, key) {
        return KeyStatus::Newer;
    }
    let is_current = keys.current.key_sha256 == key.key_sha256;
    let replaced = next.and_then(|next| next.used.as_ref());
    match (is_current, replaced.or(keys.current.since.as_ref())) {
        (true, _) if replaced.is_none() => KeyStatus::Valid,
        (true, Some(at)) if ago(at, now) < KEY_OVERLAP => KeyStatus::Valid,
        (_, Some(at)) if ago(at, now) < REPLACED_GRACE => KeyStatus::Replaced,
        _ => KeyStatus::Unknown,
    }
}

/// Returns the record after the holder of the key `presented` has received a certificate for the key `next`.
///
/// # Errors
/// Fails if `presented` is not recorded, or if another certificate was issued a short time ago. The other
/// replicas may not have received that one yet.
pub fn renewed(
    keys: Option<&AgentKeys>,
    presented: AgentKey,
    next: AgentKey,
    now: Timestamp,
) -> Result<AgentKeys, NotRenewed> {
    let is_recent = |pending: &AgentKey| {
        let since = pending.since.as_ref();
        since.is_some_and(|since| ago(since, now) < RENEWAL_PENDING)
    };
    let current = match keys {
        None => presented,
        Some(keys) if is_newer(keys, &presented) => presented,
        Some(keys) if !contains_key(keys, &presented.key_sha256) => {
            return Err(NotRenewed::Replaced);
        }
        Some(keys) => match &keys.next {
            Some(pending) if pending.key_sha256 == presented.key_sha256 => pending.clone(),
            Some(pending) if pending.key_sha256 == next.key_sha256 => keys.current.clone(),
            Some(pending) if pending.used.is_some() || is_recent(pending) => {
                return Err(NotRenewed::Renewing);
            }
            _ => keys.current.clone(),
        },
    };
    Ok(AgentKeys {
        current,
        next: Some(next),
    })
}

/// Records that a session started with this key.
pub fn record_use(keys: &mut Option<AgentKeys>, key: &AgentKey, now: Timestamp) {
    if keys.as_ref().is_none_or(|keys| is_newer(keys, key)) {
        *keys = Some(AgentKeys {
            current: key.clone(),
            next: None,
        });
    }
    let next = keys.as_mut().and_then(|keys| keys.next.as_mut());
    if let Some(next) = next.filter(|next| next.key_sha256 == key.key_sha256) {
        next.used.get_or_insert(whole_seconds(now));
    }
}

/// Returns all keys as a merge patch, which removes only fields that are null.
pub fn patch(keys: &AgentKeys) -> Value {
    let whole = |key: &AgentKey| json!({"keySHA256": key.key_sha256, "serial": key.serial, "since": key.since, "used": key.used});
    json!({"current": whole(&keys.current), "next": keys.next.as_ref().map(whole)})
}

/// Sets the condition. `refused` is the time of the last use of a foreign key. A later enrollment ends it.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    refused: Option<Timestamp>,
    keys: Option<&AgentKeys>,
    generation: i64,
    now: Timestamp,
) {
    let recorded = conditions
        .iter()
        .find(|it| it.type_ == ONE_KEY && it.status == "False");
    let Some(at) = refused.or(recorded.map(|it| it.last_transition_time.0)) else {
        return;
    };
    let since = keys.and_then(|keys| keys.current.since.as_ref());
    let state = match since.is_some_and(|since| since.0 > at) {
        true => State::new(Truth::True, reason::ONE, ""),
        false => State::new(
            Truth::False,
            reason::TWO,
            "an agent used a key that is not recorded: its credential was copied; run 'kubectl krypton join' for this member and give its agent the new bundle, which voids all older keys",
        ),
    };
    conditions::set(conditions, ONE_KEY, &state, generation, now);
}

fn ago(at: &Time, now: Timestamp) -> SignedDuration {
    now.duration_since(at.0)
}

/// Cuts the fraction of a second, which the API does not store. A value read back must equal the written one.
pub(crate) fn whole_seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(minute: i64) -> Timestamp {
        Timestamp::from_second(minute * 60).unwrap()
    }

    fn key(name: &str, minute: i64) -> AgentKey {
        AgentKey {
            key_sha256: name.to_owned(),
            serial: "01".to_owned(),
            since: Some(Time(at(minute))),
            used: None,
        }
    }

    /// Returns the status of a key without other known properties.
    fn key_status(keys: Option<&AgentKeys>, name: &str, now: Timestamp) -> KeyStatus {
        super::key_status(keys, &key(name, 0), now)
    }

    #[test]
    fn renewed_key_replaces_old_key_after_first_use() {
        let mut keys = Some(enrolled(None, key("a", 0)));
        assert_eq!(key_status(keys.as_ref(), "a", at(100)), KeyStatus::Valid);
        keys = Some(renewed(keys.as_ref(), key("a", 0), key("b", 100), at(100)).unwrap());
        // The response to the renewal may have been lost.
        for valid in ["a", "b"] {
            assert_eq!(key_status(keys.as_ref(), valid, at(900)), KeyStatus::Valid);
        }
        record_use(&mut keys, &key("b", 100), at(1000));
        record_use(&mut keys, &key("b", 100), at(1005));
        for (minute, status) in [
            (1009, KeyStatus::Valid),
            (1010, KeyStatus::Replaced),
            (1019, KeyStatus::Replaced),
            (1020, KeyStatus::Unknown),
        ] {
            let now = at(minute);
            assert_eq!(key_status(keys.as_ref(), "a", now), status, "{minute}");
            assert_eq!(key_status(keys.as_ref(), "b", now), KeyStatus::Valid);
        }
        keys = Some(renewed(keys.as_ref(), key("b", 100), key("c", 2000), at(2000)).unwrap());
        assert_eq!(key_status(keys.as_ref(), "a", at(2000)), KeyStatus::Unknown);
        assert_eq!(key_status(keys.as_ref(), "b", at(2000)), KeyStatus::Valid);
    }

    #[test]
    fn second_renewal_by_same_key_waits_for_first() {
        let keys = enrolled(None, key("a", 0));
        let keys = renewed(Some(&keys), key("a", 0), key("b", 100), at(100)).unwrap();
        let again = |next, minute| renewed(Some(&keys), key("a", 0), key(next, minute), at(minute));
        assert_eq!(again("c", 100), Err(NotRenewed::Renewing));
        again("b", 100).unwrap();
        // It was never used, because the response was lost.
        let replaced = Some(again("c", 101).unwrap());
        let status = key_status(replaced.as_ref(), "b", at(101));
        assert_eq!(status, KeyStatus::Unknown);
        // Another replica uses it, so this one must follow.
        let mut used = Some(keys);
        record_use(&mut used, &key("b", 100), at(101));
        let late = renewed(used.as_ref(), key("a", 0), key("c", 200), at(200));
        assert_eq!(late, Err(NotRenewed::Renewing));
    }

    #[test]
    fn new_enrollment_voids_all_older_keys() {
        let keys = enrolled(None, key("a", 0));
        let keys = renewed(Some(&keys), key("a", 0), key("thief", 10), at(10)).unwrap();
        let enrolled_again = enrolled(Some(&keys), key("b", 60));
        let status = |name, minute| key_status(Some(&enrolled_again), name, at(minute));
        for void in ["a", "thief"] {
            assert_eq!(status(void, 79), KeyStatus::Replaced);
            assert_eq!(status(void, 80), KeyStatus::Unknown);
        }
        assert_eq!(status("b", 80), KeyStatus::Valid);
        // A second enrollment with the same key, after a lost response, voids nothing.
        assert_eq!(enrolled(Some(&keys), key("a", 60)), keys);
    }

    #[test]
    fn enrollment_reinstates_replaced_key() {
        let keys = enrolled(None, key("a", 0));
        let mut keys = renewed(Some(&keys), key("a", 0), key("b", 10), at(10)).ok();
        record_use(&mut keys, &key("b", 10), at(11));
        // The member's cluster was restored to a time before the renewal, and its agent joins again.
        let status = |keys: Option<&AgentKeys>, name| key_status(keys, name, at(80));
        assert_eq!(status(keys.as_ref(), "a"), KeyStatus::Unknown);
        let enrolled_again = enrolled(keys.as_ref(), key("a", 60));
        assert_eq!(status(Some(&enrolled_again), "a"), KeyStatus::Valid);
        assert_eq!(status(Some(&enrolled_again), "b"), KeyStatus::Unknown);
        // The response was lost.
        let repeated = enrolled(Some(&enrolled_again), key("a", 61));
        assert_eq!(repeated, enrolled_again);
        // A key that replaced another one stays valid, and the other one stays recorded.
        assert_eq!(Some(enrolled(keys.as_ref(), key("b", 60))), keys);
    }

    #[test]
    fn voided_key_cannot_renew() {
        let keys = enrolled(None, key("stolen", 0));
        let enrolled_again = enrolled(Some(&keys), key("b", 60));
        let by = |name, minute| {
            renewed(
                Some(&enrolled_again),
                key(name, minute),
                key("c", 61),
                at(61),
            )
        };
        assert_eq!(by("stolen", 0), Err(NotRenewed::Replaced));
        // The home cluster was restored from a backup, so the hub issued this key after the record.
        let restored = by("later", 90).unwrap();
        assert_eq!(restored.current.key_sha256, "later");
    }

    #[test]
    fn member_without_a_record_takes_the_first_key() {
        assert_eq!(key_status(None, "a", at(0)), KeyStatus::Valid);
        let mut keys = None;
        record_use(&mut keys, &key("a", 5), at(5));
        assert_eq!(key_status(keys.as_ref(), "b", at(30)), KeyStatus::Unknown);
        let renewed = renewed(None, key("a", 5), key("b", 6), at(6)).unwrap();
        assert_eq!(renewed.current.key_sha256, "a");
    }

    #[test]
    fn restored_home_lets_newer_keys_in() {
        let mut keys = Some(enrolled(None, key("a", 0)));
        let status =
            |keys: &Option<AgentKeys>, key| super::key_status(keys.as_ref(), &key, at(9000));
        assert_eq!(status(&keys, key("b", 20)), KeyStatus::Unknown);
        assert_eq!(status(&keys, key("b", 21)), KeyStatus::Newer);
        record_use(&mut keys, &key("b", 8000), at(9000));
        assert_eq!(status(&keys, key("b", 8000)), KeyStatus::Valid);
        assert_eq!(status(&keys, key("a", 0)), KeyStatus::Unknown);
        // A key that a later enrollment has voided stays void.
        record_use(&mut keys, &key("a", 0), at(9000));
        assert_eq!(status(&keys, key("a", 0)), KeyStatus::Unknown);
    }

    #[test]
    fn restored_home_lets_reinstated_key_in() {
        let mut keys = Some(enrolled(None, key("a", 0)));
        keys = renewed(keys.as_ref(), key("a", 0), key("b", 10), at(10)).ok();
        let status =
            |keys: &Option<AgentKeys>, key| super::key_status(keys.as_ref(), &key, at(9000));
        // The enrollment changed nothing, because nobody had used the other key.
        assert_eq!(status(&keys, key("a", 60)), KeyStatus::Valid);
        record_use(&mut keys, &key("a", 60), at(60));
        record_use(&mut keys, &key("b", 10), at(70));
        for since in [0, 60, 90] {
            assert_eq!(status(&keys, key("a", since)), KeyStatus::Unknown);
        }
        assert_eq!(status(&keys, key("a", 91)), KeyStatus::Newer);
        record_use(&mut keys, &key("a", 91), at(9000));
        assert_eq!(status(&keys, key("a", 91)), KeyStatus::Valid);
        assert_eq!(status(&keys, key("b", 10)), KeyStatus::Unknown);
    }

    #[test]
    fn concurrent_key_use_is_shown_until_next_enrollment() {
        let mut shown = Vec::new();
        let keys = enrolled(None, key("a", 0));
        let status = |shown: &[Condition]| shown.first().map(|it| it.status.clone());
        set_condition(&mut shown, None, Some(&keys), 1, at(1));
        assert_eq!(status(&shown), None);
        set_condition(&mut shown, Some(at(2)), Some(&keys), 1, at(2));
        assert_eq!(status(&shown).as_deref(), Some("False"));
        // A restarted hub reads it from the recorded status.
        set_condition(&mut shown, None, Some(&keys), 1, at(3));
        assert_eq!(status(&shown).as_deref(), Some("False"));
        let enrolled_again = enrolled(Some(&keys), key("b", 4));
        set_condition(&mut shown, Some(at(2)), Some(&enrolled_again), 1, at(5));
        assert_eq!(status(&shown).as_deref(), Some("True"));
    }
}
