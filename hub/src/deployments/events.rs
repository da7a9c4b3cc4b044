//! Records events for the actions that members report on deployments. Each process records an action once.

use std::collections::{BTreeMap, BTreeSet};

use krypton_runtime::events::ObjectEvent;
use krypton_types::deployment::{ReportedEvent, TOLD_AT_HOME};

/// Number of remembered events of a member. It exceeds the events of several reports, because agent and
/// proxy each report their own.
const KEPT: usize = 16;

/// The recorded events of one object, by the member's name.
#[derive(Debug, Default)]
pub(super) struct RecordedEvents(BTreeMap<String, BTreeSet<u64>>);

impl RecordedEvents {
    /// Returns the events to record. For a member without remembered events, another hub has recorded the
    /// events of an object that is older than this hub's term.
    pub(super) fn news(
        &mut self,
        member: &str,
        reported_events: &[ReportedEvent],
        was_there: bool,
    ) -> Vec<ObjectEvent> {
        let now = reported_events
            .iter()
            .map(|reported_event| reported_event.at);
        let known = !self.0.contains_key(member) && was_there;
        let told = self.0.entry(member.to_owned()).or_default();
        let fresh = reported_events
            .iter()
            .filter(|reported_event| !known && !told.contains(&reported_event.at));
        let news = fresh
            .filter_map(|reported_event| event(member, reported_event))
            .collect();
        told.extend(now);
        while told.len() > KEPT {
            told.pop_first();
        }
        news
    }
}

fn event(member: &str, reported_event: &ReportedEvent) -> Option<ObjectEvent> {
    let mut known = TOLD_AT_HOME.iter();
    let (_, reason, warning) = known.find(|(reason, ..)| *reason == reported_event.reason)?;
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
        let (mut new, mut old) = (RecordedEvents::default(), RecordedEvents::default());
        let reasons =
            |news: Vec<ObjectEvent>| -> Vec<&str> { news.iter().map(|it| it.reason).collect() };
        let (made, healed) = (
            reported_event(1, "WorkspaceCreated"),
            reported_event(2, "DriftHealed"),
        );
        let first = [made.clone()];
        let both = [made, healed.clone()];
        let more = [
            healed,
            reported_event(3, "DriftHealed"),
            reported_event(4, "NotForHome"),
        ];
        assert_eq!(
            reasons(new.news("paris", &first, false)),
            ["EdgeNamespaceCreated"]
        );
        assert!(new.news("paris", &first, false).is_empty());
        assert_eq!(
            reasons(new.news("paris", &both, false)),
            ["RepairTriggered"]
        );
        // Another reporter takes over, and then the first one again.
        assert!(new.news("paris", &[], false).is_empty());
        assert!(new.news("paris", &both, false).is_empty());
        // A different hub leads.
        assert!(old.news("paris", &both, true).is_empty());
        let news = old.news("paris", &more, true);
        assert_eq!(news.len(), 1);
        assert!(news[0].warning);
        assert_eq!(news[0].message, "cluster paris: it was so");
        assert!(old.news("rome", &more, true).is_empty());
    }
}
