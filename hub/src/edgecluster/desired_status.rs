//! Records the desired state of each member in its status. It shows which members lag behind.

use std::collections::BTreeMap;

use jiff::{Timestamp, ToSpan};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::edge_cluster::{Desired, EdgeClusterStatus};
use krypton_runtime::clock::BootTime;

use crate::members::member::PublishedState;

/// The last written desired state, by member. A CRD with an earlier schema drops it.
#[derive(Debug, Default)]
pub(super) struct Wrote(BTreeMap<String, Option<Desired>>);

impl Wrote {
    /// Returns whether the recorded status equals `next`, apart from fields that an earlier CRD dropped.
    pub(super) fn is_so(
        &self,
        name: &str,
        recorded: Option<&EdgeClusterStatus>,
        next: &EdgeClusterStatus,
    ) -> bool {
        let wrote = self.0.get(name) == Some(&next.desired);
        let but_for_dropped = |recorded: &EdgeClusterStatus| {
            let mut completed = recorded.clone();
            let desired = completed.desired.take();
            completed.desired = desired.or_else(|| next.desired.clone());
            completed.observed_generation =
                recorded.observed_generation.or(next.observed_generation);
            wrote && completed == *next
        };
        recorded.is_some_and(|recorded| recorded == next || but_for_dropped(recorded))
    }

    /// Returns the last written desired state.
    pub(crate) fn of(&self, name: &str) -> Option<&Desired> {
        self.0.get(name)?.as_ref()
    }

    pub(super) fn note(&mut self, name: &str, next: &EdgeClusterStatus) {
        self.0.insert(name.to_owned(), next.desired.clone());
    }

    pub(super) fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }
}

/// Returns the desired state to record. If the hub sends the member none, the recorded one stays. An
/// unchanged state keeps its time.
pub(super) fn desired(
    recorded: Option<&Desired>,
    wrote: Option<&Desired>,
    given: Option<&PublishedState>,
    now: BootTime,
    wall: Timestamp,
) -> Option<Desired> {
    let Some(published) = given else {
        return recorded.cloned();
    };
    let (version, chart) = (
        published.desired.version,
        published.desired.chart.applied_name(),
    );
    let same = |recorded: &&Desired| {
        (recorded.epoch, recorded.generation) == (version.epoch, version.generation)
            && recorded.chart == chart
    };
    if let Some(told) = recorded.filter(same).or(wrote.filter(same)) {
        return Some(told.clone());
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

    fn said(generation: u64) -> Desired {
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
        let (mut wrote, bare) = (Wrote::default(), status(None));
        let next = status(Some(said(1)));
        assert!(!wrote.is_so("a", Some(&bare), &next));
        wrote.note("a", &next);
        assert!(wrote.is_so("a", Some(&bare), &next), "it was not kept");
        assert!(!wrote.is_so("b", Some(&bare), &next));
        assert!(!wrote.is_so("a", Some(&bare), &status(Some(said(2)))));
        let numbered = EdgeClusterStatus {
            observed_generation: Some(1),
            ..next.clone()
        };
        assert!(wrote.is_so("a", Some(&next), &numbered));
        let later = EdgeClusterStatus {
            observed_generation: Some(2),
            ..next.clone()
        };
        assert!(!wrote.is_so("a", Some(&numbered), &later));
        let other = EdgeClusterStatus {
            lease_holder: Some("x".to_owned()),
            ..next.clone()
        };
        assert!(!wrote.is_so("a", Some(&bare), &other));
        assert!(wrote.is_so("b", Some(&next), &next));
        assert!(!wrote.is_so("a", None, &next));
    }

    #[test]
    fn nothing_given_takes_nothing_away() {
        let now = BootTime::default();
        let recorded = said(1);
        let stands = desired(Some(&recorded), None, None, now, Timestamp::UNIX_EPOCH);
        assert_eq!(stands, Some(recorded));
        assert_eq!(desired(None, None, None, now, Timestamp::UNIX_EPOCH), None);
    }
}
