//! Records the desired state of each member in its status. It shows which members lag behind.

use std::collections::BTreeMap;

use jiff::{Timestamp, ToSpan};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::edge_cluster::{Desired, EdgeClusterStatus};
use krypton_runtime::clock::BootTime;

use crate::members::member::PublishedState;

/// The last written desired state, by member. A CRD with an earlier schema drops it.
pub(super) type WrittenStates = BTreeMap<String, Option<Desired>>;

/// Returns whether the recorded status equals `next`, apart from fields that an earlier CRD dropped.
pub(super) fn is_up_to_date(
    written: Option<&Option<Desired>>,
    recorded: Option<&EdgeClusterStatus>,
    next: &EdgeClusterStatus,
) -> bool {
    let is_same_without_dropped = |recorded: &EdgeClusterStatus| {
        let mut completed = recorded.clone();
        let desired = completed.desired.take();
        completed.desired = desired.or_else(|| next.desired.clone());
        completed.observed_generation = recorded.observed_generation.or(next.observed_generation);
        written == Some(&next.desired) && completed == *next
    };
    recorded.is_some_and(|recorded| recorded == next || is_same_without_dropped(recorded))
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
        let without_desired = status(None);
        let [next, changed] = [1, 2].map(|generation| status(Some(desired_state(generation))));
        let [numbered, later] = [1, 2].map(|generation| EdgeClusterStatus {
            observed_generation: Some(generation),
            ..next.clone()
        });
        let other = EdgeClusterStatus {
            lease_holder: Some("x".to_owned()),
            ..next.clone()
        };
        let written = Some(&next.desired);
        for (written, recorded, next, expected) in [
            (None, Some(&without_desired), &next, false),
            // The CRD dropped it.
            (written, Some(&without_desired), &next, true),
            (written, Some(&without_desired), &changed, false),
            (written, Some(&next), &numbered, true),
            (written, Some(&numbered), &later, false),
            (written, Some(&without_desired), &other, false),
            (None, Some(&next), &next, true),
            (written, None, &next, false),
        ] {
            let result = is_up_to_date(written, recorded, next);
            assert_eq!(result, expected, "{written:?} {recorded:?} {next:?}");
        }
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
