//! Records the desired state of each member in its status. It shows which members lag behind.

use std::collections::BTreeMap;

use jiff::{Timestamp, ToSpan};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::edge_cluster::{Desired, EdgeClusterStatus};
use krypton_runtime::clock::BootTime;

use crate::members::member::PublishedState;

/// The last written desired state, by member. A CRD with an earlier schema drops it.
#[derive(Debug, Default)]
pub(super) struct WrittenStates(BTreeMap<String, Option<Desired>>);

impl WrittenStates {
    /// Returns whether the recorded status equals `next`, apart from fields that an earlier CRD dropped.
    pub(super) fn is_up_to_date(
        &self,
        name: &str,
        recorded: Option<&EdgeClusterStatus>,
        next: &EdgeClusterStatus,
    ) -> bool {
        let is_written = self.0.get(name) == Some(&next.desired);
        let is_same_without_dropped = |recorded: &EdgeClusterStatus| {
            let mut completed = recorded.clone();
            let desired = completed.desired.take();
            completed.desired = desired.or_else(|| next.desired.clone());
            completed.observed_generation =
                recorded.observed_generation.or(next.observed_generation);
            is_written && completed == *next
        };
        recorded.is_some_and(|recorded| recorded == next || is_same_without_dropped(recorded))
    }

    /// Returns the last written desired state.
    pub(crate) fn get(&self, name: &str) -> Option<&Desired> {
        self.0.get(name)?.as_ref()
    }

    pub(super) fn insert(&mut self, name: &str, next: &EdgeClusterStatus) {
        self.0.insert(name.to_owned(), next.desired.clone());
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }
}

/// Returns the desired state to record. If the hub sends the member none, the recorded one stays. An
/// unchanged state keeps its time.
pub(super) fn desired(
    recorded: Option<&Desired>,
    written: Option<&Desired>,
    published: Option<&PublishedState>,
    now: BootTime,
    wall: Timestamp,
) -> Option<Desired> {
    let Some(published) = published else {
        return recorded.cloned();
    };
    let (version, chart) = (
        published.desired.version,
        published.desired.chart.applied_name(),
    );
    let is_same = |recorded: &&Desired| {
        (recorded.epoch, recorded.generation) == (version.epoch, version.generation)
            && recorded.chart == chart
    };
    if let Some(unchanged) = recorded.filter(is_same).or(written.filter(is_same)) {
        return Some(unchanged.clone());
    }
    let ago = i64::try_from(now.since(published.since).as_secs()).unwrap_or_default();
    let since = wall.checked_sub(ago.seconds()).unwrap_or(wall);
    let since = Timestamp::from_second(since.as_second()).unwrap_or(since);
    Some(Desired {
        epoch: version.epoch,
        generation: version.generation,
        chart,
        since: Some(Time(since)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desired_state(generation: u64) -> Desired {
        Desired {
            epoch: 1,
            generation,
            chart: "r/c:1".to_owned(),
            since: None,
        }
    }

    #[test]
    fn field_dropped_by_old_crd_is_written_once() {
        let status = |desired| EdgeClusterStatus {
            desired,
            ..EdgeClusterStatus::default()
        };
        let (mut written, without_desired) = (WrittenStates::default(), status(None));
        let next = status(Some(desired_state(1)));
        assert!(!written.is_up_to_date("a", Some(&without_desired), &next));
        written.insert("a", &next);
        assert!(
            written.is_up_to_date("a", Some(&without_desired), &next),
            "it was not kept"
        );
        assert!(!written.is_up_to_date("b", Some(&without_desired), &next));
        assert!(!written.is_up_to_date(
            "a",
            Some(&without_desired),
            &status(Some(desired_state(2)))
        ));
        let numbered = EdgeClusterStatus {
            observed_generation: Some(1),
            ..next.clone()
        };
        assert!(written.is_up_to_date("a", Some(&next), &numbered));
        let later = EdgeClusterStatus {
            observed_generation: Some(2),
            ..next.clone()
        };
        assert!(!written.is_up_to_date("a", Some(&numbered), &later));
        let other = EdgeClusterStatus {
            lease_holder: Some("x".to_owned()),
            ..next.clone()
        };
        assert!(!written.is_up_to_date("a", Some(&without_desired), &other));
        assert!(written.is_up_to_date("b", Some(&next), &next));
        assert!(!written.is_up_to_date("a", None, &next));
    }

    #[test]
    fn nothing_given_takes_nothing_away() {
        let now = BootTime::default();
        let recorded = desired_state(1);
        let kept = desired(Some(&recorded), None, None, now, Timestamp::UNIX_EPOCH);
        assert_eq!(kept, Some(recorded));
        assert_eq!(desired(None, None, None, now, Timestamp::UNIX_EPOCH), None);
    }
}
