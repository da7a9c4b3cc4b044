//! The last sent state of each subject, and the present one while it differs. Pure: the time comes in.
//!
//! Nothing is queued: a newer state replaces one that waits, and a return to the sent state removes it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use jiff::Timestamp;
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::MESSAGE_MAX;
use krypton_types::redact::redact;
use krypton_types::text::truncated;

/// Time that a change waits for a newer state of its subject. A flapping subject is sent once in this time.
pub(super) const SETTLE: Duration = Duration::from_secs(10);
/// Subjects with a remembered state. One costs about 45 bytes, so 500,000 Tenants need 23 MB.
const SUBJECTS_MAX: usize = 1_000_000;
/// Tenants with a waiting change. One costs at most 2 KiB, so all need 20 MB. The difference of a further Tenant stays,
/// and the next observation of it tries again.
const PENDING_MAX: usize = 10_000;
/// Tenants of one member with a waiting change. The rest of the room is for other members.
const PENDING_OF_MEMBER: usize = 500;
/// Longest reason of a change, in bytes.
const REASON_MAX: usize = 128;

/// The kind of a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    EdgeCluster,
    Tenant,
    KryptonDeployment,
    /// The fleet's chart. Its state is the version.
    Chart,
    /// The hub's CA. Its state is the phase of the rotation.
    CertificateAuthority,
    /// A certificate or kubeconfig that can expire.
    Credential,
}

/// The subject of a notification. Parts without meaning for the kind are empty.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) struct Subject<'a> {
    pub(crate) kind: Kind,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) member: &'a str,
}

impl<'a> Subject<'a> {
    pub(crate) const fn new(
        kind: Kind,
        namespace: &'a str,
        name: &'a str,
        member: &'a str,
    ) -> Self {
        Self {
            kind,
            namespace,
            name,
            member,
        }
    }
}

/// The name of a state.
pub(crate) type StateName = Cow<'static, str>;

/// The present state of a subject. Only a different name is a change.
#[derive(Clone, Debug)]
pub(crate) struct Status<'a> {
    pub(crate) state: StateName,
    pub(crate) reason: &'a str,
    pub(crate) message: &'a str,
}

impl Status<'_> {
    /// A state that needs no explanation.
    pub(crate) fn named(state: impl Into<StateName>) -> Self {
        Self {
            state: state.into(),
            reason: "",
            message: "",
        }
    }
}

/// A change to send.
#[derive(Clone, Debug)]
pub(super) struct Change {
    key: u64,
    /// Start of the leader term in which it was observed.
    term: BootTime,
    pub(super) kind: Kind,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) member: String,
    /// The last delivered state, once the change is taken.
    pub(super) from: StateName,
    pub(super) to: StateName,
    pub(super) reason: String,
    pub(super) message: String,
    /// When the state was observed. The same for each attempt to send it.
    pub(super) at: Timestamp,
}

/// The order of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    /// For Tenants, because there are many, and for failed attempts, which would otherwise delay the Tenants.
    is_last: bool,
    at: BootTime,
}

#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Start of the leader term that the rest belongs to.
    term: Option<BootTime>,
    hasher: RandomState,
    /// The baseline or last sent state of each subject, by a hash of the subject with a random key. Empty if the
    /// receiver may or may not have received the last one.
    sent: BTreeMap<u64, StateName>,
    /// The changes that wait.
    pending: BTreeMap<u64, (Due, Change)>,
    due: BTreeSet<(Due, u64)>,
    /// Number of Tenants with a waiting change, by member.
    tenants: BTreeMap<String, usize>,
}

impl Changes {
    /// Records the present state of a subject. The first one in a leader term is the baseline. Returns false if there
    /// is no room for it.
    pub(super) fn observe(
        &mut self,
        term: BootTime,
        subject: Subject<'_>,
        status: Status<'_>,
        (now, at): (BootTime, Timestamp),
    ) -> bool {
        if !self.begin(term) {
            return true;
        }
        let key = self.hasher.hash_one(subject);
        let Some(sent) = self.sent.get(&key) else {
            let has_room = self.sent.len() < SUBJECTS_MAX;
            if has_room {
                self.sent.insert(key, status.state);
            }
            return has_room;
        };
        if *sent == status.state {
            self.remove_pending(key);
            return true;
        }
        let (due, from) = match self.pending.get(&key) {
            Some((_, change)) if change.to == status.state => return true,
            Some((due, change)) => (*due, change.from.clone()),
            None if !self.has_room_for(subject) => return false,
            None => {
                let is_last = subject.kind == Kind::Tenant;
                let at = now + SETTLE;
                (Due { is_last, at }, StateName::default())
            }
        };
        let change = Change {
            key,
            term,
            kind: subject.kind,
            namespace: subject.namespace.to_owned(),
            name: subject.name.to_owned(),
            member: subject.member.to_owned(),
            from,
            to: status.state,
            reason: truncated(redact(status.reason), REASON_MAX),
            message: truncated(redact(status.message), MESSAGE_MAX),
            at,
        };
        self.remove_pending(key);
        self.insert_pending(due, change);
        true
    }

    fn has_room_for(&self, subject: Subject<'_>) -> bool {
        let of_member = self.tenants.get(subject.member).copied();
        subject.kind != Kind::Tenant
            || self.pending.len() < PENDING_MAX && of_member.unwrap_or_default() < PENDING_OF_MEMBER
    }

    /// Sets the last known state of a subject that has none in this term.
    pub(super) fn set_baseline(&mut self, term: BootTime, subject: Subject<'_>, state: StateName) {
        if self.begin(term) && self.sent.len() < SUBJECTS_MAX {
            let key = self.hasher.hash_one(subject);
            self.sent.entry(key).or_insert(state);
        }
    }

    /// Forgets a subject that no longer exists.
    pub(super) fn forget(&mut self, subject: Subject<'_>) {
        let key = self.hasher.hash_one(subject);
        self.sent.remove(&key);
        self.remove_pending(key);
    }

    /// Takes the change that has been due for the longest time. It counts as sent until [`Self::put_back`].
    pub(super) fn take(&mut self, term: BootTime, now: BootTime) -> Option<Change> {
        self.begin(term);
        let first_of_last = Due {
            is_last: true,
            at: BootTime::default(),
        };
        let first = [
            self.due.first().copied(),
            self.due.range((first_of_last, 0)..).next().copied(),
        ];
        let mut first = first.into_iter().flatten();
        let (_, key) = first.find(|(due, _)| due.at <= now)?;
        let mut change = self.remove_pending(key)?;
        let sent = self.sent.insert(key, change.to.clone())?;
        if change.from.is_empty() {
            change.from = sent;
        }
        Some(change)
    }

    /// Takes back a change that may not have arrived. A newer state of its subject replaces it. The present state is
    /// sent even if it is the one before.
    pub(super) fn put_back(&mut self, change: Change, now: BootTime) {
        let key = change.key;
        let is_known = self.sent.get(&key) == Some(&change.to);
        if self.term != Some(change.term) || !is_known {
            return;
        }
        self.sent.insert(key, StateName::default());
        match self.pending.get_mut(&key) {
            Some((_, newer)) => newer.from = change.from,
            None => {
                let at = now + SETTLE;
                self.insert_pending(Due { is_last: true, at }, change);
            }
        }
    }

    /// Starts over in a new leader term. Returns false for a term that has ended.
    fn begin(&mut self, term: BootTime) -> bool {
        if self.term < Some(term) {
            *self = Self {
                term: Some(term),
                ..Self::default()
            };
        }
        self.term == Some(term)
    }

    fn insert_pending(&mut self, due: Due, change: Change) {
        if change.kind == Kind::Tenant {
            *self.tenants.entry(change.member.clone()).or_default() += 1;
        }
        self.due.insert((due, change.key));
        self.pending.insert(change.key, (due, change));
    }

    fn remove_pending(&mut self, key: u64) -> Option<Change> {
        let (due, change) = self.pending.remove(&key)?;
        self.due.remove(&(due, key));
        if change.kind == Kind::Tenant
            && let Some(count) = self.tenants.get_mut(&change.member)
        {
            *count -= 1;
            if *count == 0 {
                self.tenants.remove(&change.member);
            }
        }
        Some(change)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    type StatePair = (&'static str, &'static str);

    fn names((from, to): StatePair) -> (StateName, StateName) {
        (from.into(), to.into())
    }

    fn at(second: u64) -> BootTime {
        BootTime(Duration::from_secs(second))
    }

    fn observe(changes: &mut Changes, name: &str, state: &'static str, second: u64) -> bool {
        observe_in(changes, at(0), name, state, second)
    }

    fn observe_in(
        changes: &mut Changes,
        term: BootTime,
        name: &str,
        state: &'static str,
        second: u64,
    ) -> bool {
        let subject = Subject::new(Kind::Tenant, "default", name, "edge-1");
        let status = Status {
            state: state.into(),
            reason: "HelmFailed",
            message: "the upgrade failed; password: hunter2",
        };
        let wall = i64::try_from(second).unwrap();
        let times = (at(second), Timestamp::from_second(wall).unwrap());
        changes.observe(term, subject, status, times)
    }

    /// Returns a change of Tenant default/acme on edge-1 from Ready to Error.
    pub(in crate::notify) fn change() -> Change {
        let mut changes = Changes::default();
        observe(&mut changes, "acme", "Ready", 0);
        observe(&mut changes, "acme", "Error", 1);
        changes.take(at(0), at(11)).unwrap()
    }

    /// Each case has the observed states with their seconds, and the expected changes with the second of the attempt.
    #[test]
    fn latest_state_is_sent_once_after_settling() {
        type Case = (
            &'static [(&'static str, u64)],
            &'static [(u64, Option<StatePair>)],
        );
        let cases: [Case; 6] = [
            // The baseline is not sent.
            (&[("Ready", 0), ("Ready", 5)], &[(60, None)]),
            (
                &[("Ready", 0), ("Error", 1)],
                &[(10, None), (11, Some(("Ready", "Error"))), (60, None)],
            ),
            // The latest state wins, and does not wait longer.
            (
                &[("Ready", 0), ("Pending", 1), ("Error", 9)],
                &[(11, Some(("Ready", "Error"))), (60, None)],
            ),
            // The subject is back in its last sent state.
            (&[("Ready", 0), ("Pending", 1), ("Ready", 9)], &[(60, None)]),
            (
                &[("Ready", 0), ("Error", 1), ("Ready", 2), ("Error", 3)],
                &[(12, None), (13, Some(("Ready", "Error"))), (60, None)],
            ),
            (&[("Error", 0)], &[(60, None)]),
        ];
        for (observed, expected) in cases {
            let mut changes = Changes::default();
            for &(state, second) in observed {
                assert!(observe(&mut changes, "acme", state, second));
            }
            for &(second, change) in expected {
                let taken = changes.take(at(0), at(second));
                let taken = taken.map(|change| (change.from, change.to));
                assert_eq!(taken, change.map(names), "{observed:?} at {second}");
            }
        }
    }

    #[test]
    fn unsent_change_is_retried_unless_replaced() {
        let tested: [(&[&'static str], Option<StatePair>); 5] = [
            (&[], Some(("Ready", "Error"))),
            (&["Error"], Some(("Ready", "Error"))),
            (&["Pending"], Some(("Ready", "Pending"))),
            // The receiver may have got the error.
            (&["Ready"], Some(("Ready", "Ready"))),
            (&["Ready", "Error"], Some(("Ready", "Error"))),
        ];
        for (meanwhile, expected) in tested {
            let mut changes = Changes::default();
            observe(&mut changes, "acme", "Ready", 0);
            observe(&mut changes, "acme", "Error", 1);
            let first = changes.take(at(0), at(11)).unwrap();
            for &state in meanwhile {
                observe(&mut changes, "acme", state, 12);
            }
            let observed_at = first.at;
            changes.put_back(first, at(13));
            let retried = changes.take(at(0), at(23));
            if let Some(retried) = retried.as_ref().filter(|it| it.to == "Error") {
                // Its id depends on the time.
                assert_eq!(retried.at, observed_at);
            }
            let retried = retried.map(|change| (change.from, change.to));
            assert_eq!(retried, expected.map(names), "{meanwhile:?}");
            assert!(changes.take(at(0), at(60)).is_none(), "{meanwhile:?}");
        }
    }

    #[test]
    fn failed_attempts_delay_no_tenant() {
        let mut changes = Changes::default();
        observe(&mut changes, "acme", "Ready", 0);
        let subject = Subject::new(Kind::Chart, "", "", "");
        for version in ["1.0.0", "1.1.0"] {
            let status = Status::named(version);
            changes.observe(at(0), subject, status, (at(0), Timestamp::UNIX_EPOCH));
        }
        observe(&mut changes, "acme", "Error", 1);
        let failed = changes.take(at(0), at(11)).unwrap();
        assert_eq!(failed.kind, Kind::Chart);
        changes.put_back(failed, at(11));
        let kinds = [at(30), at(30)].map(|now| changes.take(at(0), now).unwrap().kind);
        assert_eq!(kinds, [Kind::Tenant, Kind::Chart]);
    }

    #[test]
    fn change_after_delivery_is_sent_too() {
        let mut changes = Changes::default();
        observe(&mut changes, "acme", "Ready", 0);
        observe(&mut changes, "acme", "Error", 1);
        assert!(changes.take(at(0), at(11)).is_some());
        observe(&mut changes, "acme", "Ready", 12);
        let change = changes.take(at(0), at(22)).unwrap();
        assert_eq!((&*change.from, &*change.to), ("Error", "Ready"));
    }

    #[test]
    fn new_term_starts_with_new_baseline() {
        let mut changes = Changes::default();
        observe(&mut changes, "acme", "Ready", 0);
        observe(&mut changes, "acme", "Error", 1);
        let unsent = changes.take(at(0), at(11)).unwrap();
        observe(&mut changes, "other", "Ready", 0);
        observe(&mut changes, "other", "Error", 1);
        let term = at(20);
        assert!(changes.take(term, at(60)).is_none());
        changes.put_back(unsent, at(60));
        observe_in(&mut changes, term, "acme", "Pending", 61);
        assert!(changes.take(term, at(99)).is_none());
        observe_in(&mut changes, term, "acme", "Ready", 100);
        let change = changes.take(term, at(110)).unwrap();
        assert_eq!((&*change.from, &*change.to), ("Pending", "Ready"));
    }

    #[test]
    fn recorded_state_precedes_first_observation() {
        let subject = Subject::new(Kind::Chart, "", "", "");
        let mut changes = Changes::default();
        for (recorded, current, expected) in
            [("1.0.0", "1.1.0", Some("1.0.0")), ("1.1.0", "1.1.0", None)]
        {
            changes.set_baseline(at(0), subject, recorded.into());
            let status = Status::named(current);
            changes.observe(at(0), subject, status, (at(0), Timestamp::UNIX_EPOCH));
            let change = changes.take(at(0), at(10));
            assert_eq!(change.map(|it| it.from), expected.map(StateName::from));
        }
    }

    #[test]
    fn waiting_changes_are_bounded_and_return() {
        let mut changes = Changes::default();
        let names: Vec<String> = (0..=PENDING_OF_MEMBER)
            .map(|number| number.to_string())
            .collect();
        for name in &names {
            assert!(observe(&mut changes, name, "Ready", 0));
        }
        let has_room = |changes: &mut Changes, name: &String| observe(changes, name, "Error", 1);
        let kept = names.iter().filter(|name| has_room(&mut changes, name));
        assert_eq!(kept.count(), PENDING_OF_MEMBER);
        // Other subjects have room, and come first.
        let chart = Subject::new(Kind::Chart, "", "", "");
        let other = Subject::new(Kind::Tenant, "default", "acme", "edge-2");
        for (subject, state) in [
            (chart, "1.0.0"),
            (chart, "1.1.0"),
            (other, "Ready"),
            (other, "Error"),
        ] {
            let status = Status::named(state);
            assert!(changes.observe(at(0), subject, status, (at(2), Timestamp::UNIX_EPOCH)));
        }
        let first = changes.take(at(0), at(12)).unwrap();
        assert_eq!(first.kind, Kind::Chart);
        assert!(changes.take(at(0), at(12)).is_some());
        // The next report of the last one finds room.
        assert!(observe(
            &mut changes,
            &names[PENDING_OF_MEMBER],
            "Error",
            12
        ));
        let sent = std::iter::from_fn(|| changes.take(at(0), at(60)));
        assert_eq!(sent.count(), PENDING_OF_MEMBER + 1);
        assert!(changes.tenants.is_empty());
    }

    #[test]
    fn forgotten_subject_is_not_sent() {
        let mut changes = Changes::default();
        observe(&mut changes, "acme", "Ready", 0);
        observe(&mut changes, "acme", "Error", 1);
        changes.forget(Subject::new(Kind::Tenant, "default", "acme", "edge-1"));
        assert!(changes.take(at(0), at(60)).is_none());
        // A new object of this name.
        observe(&mut changes, "acme", "Pending", 61);
        assert!(changes.take(at(0), at(99)).is_none());
    }
}
