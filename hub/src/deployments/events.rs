//! Records events for the actions that members report on deployments. Each process records an action once.

use std::collections::{BTreeMap, BTreeSet};

use krypton_runtime::events::ObjectEvent;
use krypton_types::deployment::{RECORDED_EVENTS, ReportedEvent};

/// Number of remembered events of a member. It exceeds the events of several reports, because agent and
/// proxy each report their own.
const EVENTS_MAX: usize = 16;

/// The recorded events of one object, by the member's name.
#[derive(Debug, Default)]
pub(super) struct RecordedEvents(BTreeMap<String, BTreeSet<u64>>);

impl RecordedEvents {
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
        let is_recorded_elsewhere = !self.0.contains_key(member) && predates_term;
        let recorded = self.0.entry(member.to_owned()).or_default();
        let unrecorded = reported_events.iter().filter(|reported_event| {
            !is_recorded_elsewhere && !recorded.contains(&reported_event.at)
        });
        let events = unrecorded
            .filter_map(|reported_event| event(member, reported_event))
            .collect();
        recorded.extend(times);
        while recorded.len() > EVENTS_MAX {
            recorded.pop_first();
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
    fn reported_action_emits_one_event_across_hubs() {
        let (mut first_hub, mut second_hub) =
            (RecordedEvents::default(), RecordedEvents::default());
        let reasons =
            |events: Vec<ObjectEvent>| -> Vec<&str> { events.iter().map(|it| it.reason).collect() };
        let (created, healed) = (
            reported_event(1, "WorkspaceCreated"),
            reported_event(2, "DriftHealed"),
        );
        let created_only = [created.clone()];
        let both = [created, healed.clone()];
        let later = [
            healed,
            reported_event(3, "DriftHealed"),
            reported_event(4, "NotForHome"),
        ];
        assert_eq!(
            reasons(first_hub.unrecorded("paris", &created_only, false)),
            ["EdgeNamespaceCreated"]
        );
        assert!(
            first_hub
                .unrecorded("paris", &created_only, false)
                .is_empty()
        );
        assert_eq!(
            reasons(first_hub.unrecorded("paris", &both, false)),
            ["RepairTriggered"]
        );
        // Another reporter takes over, and then the first one again.
        assert!(first_hub.unrecorded("paris", &[], false).is_empty());
        assert!(first_hub.unrecorded("paris", &both, false).is_empty());
        // A different hub leads.
        assert!(second_hub.unrecorded("paris", &both, true).is_empty());
        let events = second_hub.unrecorded("paris", &later, true);
        assert_eq!(events.len(), 1);
        assert!(events[0].warning);
        assert_eq!(events[0].message, "cluster paris: it was so");
        assert!(second_hub.unrecorded("rome", &later, true).is_empty());
    }
}
