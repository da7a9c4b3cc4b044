//! Records events for the actions that members report on deployments. Each process records an action once.

use std::collections::{BTreeMap, BTreeSet};

use krypton_runtime::events::ObjectEvent;
use krypton_types::deployment::{RECORDED_EVENTS, ReportedEvent};

/// Number of remembered events of a member. It exceeds the events of several reports, because agent and
/// proxy each report their own.
const EVENTS_MAX: usize = 16;

/// The recorded events of one object.
#[derive(Debug, Default)]
pub(super) struct RecordedEvents {
    /// The times of the events, by the member's name.
    times: BTreeMap<String, BTreeSet<u64>>,
    /// The last recorded repair since the object was ready.
    repair: Option<Repair>,
}

/// A repair of a release by a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repair {
    /// The member has corrected objects. Home's event for it is `RepairTriggered`.
    Corrected,
    /// The member installs the release again.
    Reinstalled,
}

impl Repair {
    fn from_event(event: &ReportedEvent) -> Option<Self> {
        match event.reason.as_str() {
            "DriftHealed" => Some(Self::Corrected),
            "ReleaseMissing" | "ReleaseNotInstalled" => Some(Self::Reinstalled),
            _ => None,
        }
    }
}

impl RecordedEvents {
    /// Returns the last repair since the object was ready, including events that this hub has yet to record. For a
    /// member without remembered events, another hub has recorded them.
    pub(super) fn repair(
        &self,
        reported_events: &[(String, Vec<ReportedEvent>)],
    ) -> Option<Repair> {
        let mut unrecorded = reported_events.iter().flat_map(|(member, events)| {
            let recorded = self.times.get(member);
            events
                .iter()
                .filter(move |event| recorded.is_some_and(|times| !times.contains(&event.at)))
                .filter_map(Repair::from_event)
        });
        unrecorded.next_back().or(self.repair)
    }

    /// The object is ready.
    pub(super) fn end_repair(&mut self) {
        self.repair = None;
    }

    /// Returns the events to record. For a member without remembered events, another hub has recorded the
    /// events of an object that is older than this hub's term.
    pub(super) fn unrecorded(
        &mut self,
        member: &str,
        reported_events: &[ReportedEvent],
        predates_term: bool,
    ) -> Vec<ObjectEvent> {
        let times = reported_events
            .iter()
            .map(|reported_event| reported_event.at);
        let is_recorded_elsewhere = !self.times.contains_key(member) && predates_term;
        let recorded = self.times.entry(member.to_owned()).or_default();
        let unrecorded = reported_events.iter().filter(|reported_event| {
            !is_recorded_elsewhere && !recorded.contains(&reported_event.at)
        });
        let mut events = Vec::new();
        for reported_event in unrecorded {
            self.repair = Repair::from_event(reported_event).or(self.repair);
            events.extend(event(member, reported_event));
        }
        recorded.extend(times.clone());
        // An event that is still reported stays recorded, however early its time.
        while recorded.len() > EVENTS_MAX {
            let oldest = recorded
                .iter()
                .find(|at| !times.clone().any(|time| time == **at));
            let Some(oldest) = oldest.copied() else { break };
            recorded.remove(&oldest);
        }
        events
    }
}

fn event(member: &str, reported_event: &ReportedEvent) -> Option<ObjectEvent> {
    let mut reasons = RECORDED_EVENTS.iter();
    let (_, reason, warning) = reasons.find(|(reason, ..)| *reason == reported_event.reason)?;
    Some(ObjectEvent {
        warning: *warning,
        reason,
        message: format!("cluster {member}: {}", reported_event.message),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported_event(at: u64, reason: &str) -> ReportedEvent {
        ReportedEvent {
            at,
            reason: reason.to_owned(),
            message: "it was so".to_owned(),
        }
    }

    #[test]
    fn repair_is_remembered_until_object_is_ready() {
        let mut recorded_events = RecordedEvents::default();
        let healed = [reported_event(1, "DriftHealed")];
        let reported = |events: &[ReportedEvent]| [("paris".to_owned(), events.to_vec())];
        assert_eq!(recorded_events.repair(&reported(&healed)), None);
        recorded_events.unrecorded("paris", &[], true);
        let repair = Some(Repair::Corrected);
        assert_eq!(recorded_events.repair(&reported(&healed)), repair);
        recorded_events.unrecorded("paris", &healed, true);
        assert_eq!(recorded_events.repair(&reported(&healed)), repair);
        assert_eq!(recorded_events.repair(&[]), repair);

        recorded_events.end_repair();
        assert_eq!(recorded_events.repair(&reported(&healed)), None);
        let missing = [
            reported_event(2, "ReleaseMissing"),
            reported_event(3, "WorkspaceKept"),
        ];
        let repair = Some(Repair::Reinstalled);
        assert_eq!(recorded_events.repair(&reported(&missing)), repair);
        // Another hub has recorded the events from before this hub's term.
        let mut second_hub = RecordedEvents::default();
        second_hub.unrecorded("paris", &missing, true);
        assert_eq!(second_hub.repair(&reported(&missing)), None);
    }

    #[test]
    fn early_event_of_wrong_clock_is_recorded_once() {
        let mut hub = RecordedEvents::default();
        for at in 100..130 {
            hub.unrecorded("paris", &[reported_event(at, "DriftHealed")], false);
        }
        let early = [reported_event(1, "DriftHealed")];
        assert_eq!(hub.unrecorded("paris", &early, false).len(), 1);
        assert!(hub.unrecorded("paris", &early, false).is_empty());
        assert_eq!(hub.times["paris"].len(), EVENTS_MAX);
    }

    #[test]
    fn reported_action_emits_one_event_across_hubs() {
        let (mut first_hub, mut second_hub) =
            (RecordedEvents::default(), RecordedEvents::default());
        let created = reported_event(1, "WorkspaceCreated");
        let healed = reported_event(2, "DriftHealed");
        let created_only = [created.clone()];
        let both = [created, healed.clone()];
        let later = [
            healed,
            reported_event(3, "DriftHealed"),
            reported_event(4, "NotForHome"),
        ];
        for (reported, expected) in [
            (&created_only[..], &["EdgeNamespaceCreated"][..]),
            (&created_only[..], &[]),
            (&both[..], &["RepairTriggered"]),
            // Another reporter takes over, and then the first one again.
            (&[], &[]),
            (&both[..], &[]),
        ] {
            let events = first_hub.unrecorded("paris", reported, false);
            let reasons: Vec<&str> = events.iter().map(|it| it.reason).collect();
            assert_eq!(reasons, expected, "{reported:?}");
        }
        // A different hub leads.
        assert!(second_hub.unrecorded("paris", &both, true).is_empty());
        let events = second_hub.unrecorded("paris", &later, true);
        assert_eq!(events.len(), 1);
        assert!(events[0].warning);
        assert_eq!(events[0].message, "cluster paris: it was so");
        assert!(second_hub.unrecorded("rome", &later, true).is_empty());
    }
}
