//! Derives the status of an EdgeCluster from the observation of its member. Performs no I/O.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use krypton_crds::edge_cluster::{Applied, EdgeClusterStatus, Mode, TenantCounts, TenantSummaries};
use krypton_types::conditions::{self, Outlook, READY, State, Truth, reason};
use krypton_types::validity::Validity;

use super::credential_expiry::{self, MemberCredential};
use crate::members::agent_keys::{self, whole_seconds};
use crate::members::observation::{MemberObservation, MemberValuesState};

/// Minimum interval between writes of `lastSeen`, in seconds.
const LAST_SEEN_EVERY: i64 = 60;

/// Derives the EdgeCluster's status from the observation. The result equals `previous` if nothing has changed.
/// Without `summaries`, the recorded summary stays.
pub fn status(
    member: &str,
    previous: Option<&EdgeClusterStatus>,
    observation: &MemberObservation,
    counts: TenantCounts,
    summaries: Option<TenantSummaries>,
    generation: i64,
    now: Timestamp,
) -> EdgeClusterStatus {
    let mut next = previous.cloned().unwrap_or_default();
    let set = |next: &mut EdgeClusterStatus, type_: &str, state: &State| {
        conditions::set(&mut next.conditions, type_, state, generation, now);
    };
    // While a member is unknown, the status that another hub or an earlier process recorded stays for a while.
    let is_starting = |state: &State| state.reason == reason::STARTING;
    let is_unknown = is_starting(&observation.connected) && is_starting(&observation.healthy);
    let keeps_recorded = is_unknown && !observation.record_expired && next.mode.is_some();
    if !keeps_recorded {
        next.mode = Some(observation.mode);
        next.lease_holder.clone_from(&observation.holder);
    }
    for (type_, state) in [
        ("Connected", &observation.connected),
        (
            conditions::TARGET_RESOLVED,
            observation.source.as_ref().unwrap_or(&observation.resolved),
        ),
        ("Healthy", &observation.healthy),
    ] {
        let is_target = type_ == conditions::TARGET_RESOLVED;
        if keeps_recorded && !is_target && conditions::find(&next.conditions, type_).is_some() {
            continue;
        }
        set(&mut next, type_, state);
    }
    next.observed_generation = Some(generation);
    let ready = ready(&next.conditions);
    set(&mut next, READY, &ready);
    set_progress(&mut next.conditions, ready, generation, now);
    if let Some(state) = &observation.uninstalled {
        set(&mut next, "Uninstalled", state);
    }
    match &observation.values {
        MemberValuesState::Unknown => {}
        MemberValuesState::FleetOnly => next
            .conditions
            .retain(|condition| condition.type_ != conditions::VALUES_RESOLVED),
        MemberValuesState::Reported(state) => set(&mut next, conditions::VALUES_RESOLVED, state),
    }
    if observation.kubernetes_version.is_some() {
        next.kubernetes_version
            .clone_from(&observation.kubernetes_version);
    }
    // The UID of the first cluster under this name is never overwritten.
    if next.cluster_uid.is_none() && observation.mode != Mode::None {
        next.cluster_uid.clone_from(&observation.uid);
    }
    if observation.agent_version.is_some() {
        next.agent_version.clone_from(&observation.agent_version);
    }
    let certificate = certificate_validity(next.certificate_expiry.as_ref(), observation);
    if let Some(certificate) = certificate {
        next.certificate_expiry = Some(whole_seconds(certificate.not_after));
    }
    let type_ = conditions::CLOCK_SYNCHRONIZED;
    if !keeps_recorded && observation.mode == Mode::Proxy {
        next.conditions.retain(|condition| condition.type_ != type_);
    } else if let Some(state) = &observation.clock {
        set(&mut next, type_, state);
    }
    if observation.roots.is_some() {
        next.trusted_roots.clone_from(&observation.roots);
    }
    if let Some(key) = &observation.agent_key
        && observation.certificate_reported
    {
        agent_keys::record_use(&mut next.agent_keys, key, now);
    }
    let (refused, keys) = (observation.key_refused, next.agent_keys.as_ref());
    agent_keys::set_condition(&mut next.conditions, refused, keys, generation, now);
    let credentials = [
        (MemberCredential::Agent, certificate),
        (MemberCredential::Access, observation.access),
    ];
    credential_expiry::set_conditions(&mut next.conditions, member, credentials, generation, now);
    if observation.connected.truth == Truth::True {
        next.tenants = Some(counts);
        if let Some(summaries) = summaries {
            let any = summaries != TenantSummaries::default();
            next.tenant_summaries = any.then_some(summaries);
        }
        let due = next
            .last_seen
            .as_ref()
            .is_none_or(|seen| now.as_second() - seen.0.as_second() >= LAST_SEEN_EVERY);
        if due {
            next.last_seen = Some(whole_seconds(now));
        }
    }
    if let Some((version, digest)) = &observation.applied {
        next.applied = Some(Applied {
            epoch: version.epoch,
            generation: version.generation,
            digest: digest.clone(),
        });
    }
    next
}

/// Ready means that the member is connected and that a process reconciles it. Otherwise, the state of the first condition
/// that does not hold.
fn ready(conditions: &[Condition]) -> State {
    let state = |type_| conditions::find(conditions, type_);
    let decisive = match state("Connected") {
        Some(connected) if connected.truth == Truth::True => state("Healthy"),
        other => other,
    };
    decisive.unwrap_or_default()
}

/// Sets `Reconciling` or `Stalled` while the member is not ready. A ban, a suspension or a conflict
/// of identities in `Healthy` outranks a lost connection, because the hub then does not connect.
fn set_progress(conditions: &mut Vec<Condition>, ready: State, generation: i64, now: Timestamp) {
    let outlook = |state: &State| Outlook::from_reason(&state.reason);
    let lasting = conditions::find(conditions, "Healthy")
        .filter(|healthy| outlook(healthy) != Outlook::Reconciling);
    let decisive = lasting.unwrap_or(ready);
    let outlook = outlook(&decisive);
    conditions::set_progress(conditions, &decisive, outlook, generation, now);
}

/// Returns the validity of the agent's certificate. A session's report takes precedence. Otherwise the later of
/// the known and the recorded one counts, because another hub may have recorded a renewal.
fn certificate_validity(
    recorded: Option<&Time>,
    observation: &MemberObservation,
) -> Option<Validity> {
    let recorded = recorded.map(|expiry| Validity::until(expiry.0));
    let Some(known) = observation.certificate else {
        return recorded;
    };
    let is_later = |recorded: &Validity| {
        !observation.certificate_reported
            && recorded.not_after.as_second() > known.not_after.as_second()
    };
    Some(recorded.filter(is_later).unwrap_or(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Returns the status of member `a` at this second.
    fn next_status(
        previous: Option<&EdgeClusterStatus>,
        observation: &MemberObservation,
        second: i64,
    ) -> EdgeClusterStatus {
        let counts = TenantCounts::default();
        status("a", previous, observation, counts, None, 1, at(second))
    }

    #[test]
    fn member_is_ready_while_connected_and_healthy() {
        let state = |truth, reason: &str| State::new(truth, reason, format!("why {reason}"));
        let status_for = |connected: Truth, healthy: Truth| {
            let observation = MemberObservation {
                connected: state(connected, "C"),
                healthy: state(healthy, "H"),
                ..MemberObservation::default()
            };
            let next = next_status(None, &observation, 0);
            conditions::find(&next.conditions, READY).unwrap()
        };
        for (connected, healthy, expected) in [
            (Truth::True, Truth::True, (Truth::True, "H")),
            (Truth::True, Truth::False, (Truth::False, "H")),
            (Truth::True, Truth::Unknown, (Truth::Unknown, "H")),
            (Truth::False, Truth::True, (Truth::False, "C")),
            (Truth::Unknown, Truth::False, (Truth::Unknown, "C")),
        ] {
            let expected = state(expected.0, expected.1);
            assert_eq!(status_for(connected, healthy), expected);
        }
    }

    #[test]
    fn unready_member_is_reconciling_stalled_or_suspended() {
        let (no, unknown) = (Truth::False, Truth::Unknown);
        for (connected, healthy, expected) in [
            (
                (Truth::True, reason::CONNECTED),
                (Truth::True, reason::RECONCILING),
                None,
            ),
            (
                (unknown, reason::STARTING),
                (unknown, reason::STARTING),
                Some(("Reconciling", reason::STARTING)),
            ),
            (
                (no, reason::AGENT_AWAY),
                (unknown, reason::AGENT_AWAY),
                Some(("Reconciling", reason::AGENT_AWAY)),
            ),
            (
                (no, reason::KUBECONFIG_INVALID),
                (unknown, reason::KUBECONFIG_INVALID),
                Some(("Stalled", reason::KUBECONFIG_INVALID)),
            ),
            (
                (Truth::True, reason::CONNECTED),
                (no, reason::DUPLICATE),
                Some(("Stalled", reason::DUPLICATE)),
            ),
            // The ban is the reason why the agent is away.
            (
                (no, reason::AGENT_AWAY),
                (no, reason::BANNED),
                Some(("Stalled", reason::BANNED)),
            ),
            (
                (unknown, reason::STARTING),
                (unknown, reason::SUSPENDED),
                None,
            ),
        ] {
            let state = |(truth, reason): (Truth, &str)| State::new(truth, reason, "why");
            let observation = MemberObservation {
                connected: state(connected),
                healthy: state(healthy),
                ..MemberObservation::default()
            };
            let next = next_status(None, &observation, 0);
            let shown = ["Reconciling", "Stalled"].map(|type_| {
                let found = conditions::find(&next.conditions, type_)?;
                assert_eq!((found.truth, &*found.message), (Truth::True, "why"));
                Some((type_, found.reason))
            });
            let expected = expected.map(|(type_, reason)| (type_, reason.to_owned()));
            let shown: Vec<_> = shown.into_iter().flatten().collect();
            assert_eq!(shown, Vec::from_iter(expected), "{observation:?}");
        }
    }

    #[test]
    fn last_seen_is_written_once_per_minute() {
        let observation = MemberObservation {
            mode: Mode::Proxy,
            connected: State::new(Truth::True, reason::CONNECTED, ""),
            uid: Some("u".to_owned()),
            ..MemberObservation::default()
        };
        let first = next_status(None, &observation, 100);
        assert_eq!(first, next_status(Some(&first), &observation, 159));
        assert_ne!(first, next_status(Some(&first), &observation, 160));
    }

    #[test]
    fn clock_of_agent_is_written_only_on_change() {
        let with_clock = |truth: Option<Truth>| MemberObservation {
            clock: truth.map(|truth| State::new(truth, "R", "why")),
            ..MemberObservation::default()
        };
        let truth = |status: &EdgeClusterStatus| {
            let clock = conditions::find(&status.conditions, conditions::CLOCK_SYNCHRONIZED);
            clock.map(|clock| clock.truth)
        };
        let unknown = next_status(None, &with_clock(None), 0);
        assert_eq!(truth(&unknown), None);
        let wrong = next_status(Some(&unknown), &with_clock(Some(Truth::False)), 0);
        assert_eq!(truth(&wrong), Some(Truth::False));
        // The next session of the agent, and the next leader before one.
        for observed in [Some(Truth::False), None] {
            assert_eq!(next_status(Some(&wrong), &with_clock(observed), 5), wrong);
        }
        let correct = next_status(Some(&wrong), &with_clock(Some(Truth::True)), 10);
        assert_eq!(truth(&correct), Some(Truth::True));
        let without_agent = MemberObservation {
            mode: Mode::Proxy,
            record_expired: true,
            ..with_clock(Some(Truth::True))
        };
        assert_eq!(truth(&next_status(Some(&wrong), &without_agent, 10)), None);
    }

    #[test]
    fn earlier_certificate_expiry_is_recorded_only_from_session() {
        for (known, is_reported, recorded, expected) in [
            (None, false, None, None),
            (None, false, Some(200), Some(200)),
            (Some(100), false, None, Some(100)),
            (Some(100), false, Some(200), Some(200)),
            (Some(300), false, Some(200), Some(300)),
            (Some(100), true, Some(200), Some(100)),
            (Some(300), true, Some(200), Some(300)),
        ] {
            let observation = MemberObservation {
                certificate: known.map(|end| Validity::until(at(end))),
                certificate_reported: is_reported,
                ..MemberObservation::default()
            };
            let previous = EdgeClusterStatus {
                certificate_expiry: recorded.map(|end| Time(at(end))),
                ..EdgeClusterStatus::default()
            };
            let next = next_status(Some(&previous), &observation, 0);
            let expiry = next.certificate_expiry.map(|end| end.0.as_second());
            assert_eq!(expiry, expected, "{known:?} {is_reported} {recorded:?}");
            let has_condition = conditions::find(&next.conditions, "CertificateCurrent").is_some();
            assert_eq!(has_condition, expected.is_some());
        }
    }

    #[test]
    fn silent_member_keeps_recorded_status_for_grace_period() {
        let reported = MemberObservation {
            mode: Mode::Proxy,
            connected: State::new(Truth::True, reason::CONNECTED, ""),
            healthy: State::new(Truth::True, reason::RECONCILING, ""),
            holder: Some("hub/a".to_owned()),
            ..MemberObservation::default()
        };
        let first = next_status(None, &reported, 100);
        let silent = |record_expired| MemberObservation {
            record_expired,
            ..MemberObservation::default()
        };
        let unreachable = MemberObservation {
            connected: State::new(Truth::False, reason::UNREACHABLE, ""),
            ..silent(false)
        };
        let condition = |status: &EdgeClusterStatus, type_| {
            conditions::find(&status.conditions, type_)
                .map(|it| format!("{:?} {}", it.truth, it.reason))
        };
        let late_report = MemberObservation {
            record_expired: true,
            ..reported
        };
        let healthy = (Mode::Proxy, "True Connected", "True Reconciling");
        let starting = (Mode::None, "Unknown Starting", "Unknown Starting");
        let lost = (Mode::None, "False Unreachable", "Unknown Starting");
        for (previous, observation, (mode, connected, healthy)) in [
            (Some(&first), silent(false), healthy),
            (Some(&first), silent(true), starting),
            (Some(&first), unreachable, lost),
            // A report counts at any time.
            (Some(&first), late_report, healthy),
            // Without a recorded status, nothing can stay.
            (None, silent(false), starting),
        ] {
            let next = next_status(previous, &observation, 100);
            assert_eq!(next.mode, Some(mode), "{observation:?}");
            let has_holder = next.lease_holder.is_some();
            assert_eq!(has_holder, mode == Mode::Proxy, "{observation:?}");
            assert_eq!(condition(&next, "Connected").as_deref(), Some(connected));
            assert_eq!(condition(&next, "Healthy").as_deref(), Some(healthy));
        }
    }

    #[test]
    fn recorded_cluster_uid_is_never_overwritten() {
        let with_uid = |uid: &str| MemberObservation {
            mode: Mode::Proxy,
            uid: Some(uid.to_owned()),
            ..MemberObservation::default()
        };
        let first = next_status(None, &with_uid("u"), 0);
        let second = next_status(Some(&first), &with_uid("v"), 0);
        assert_eq!(second.cluster_uid.as_deref(), Some("u"));
    }
}
