//! Lists one member's state of the Tenants whose own status has no room for all members. Performs no I/O and
//! bounds the size.

use krypton_crds::edge_cluster::{TenantSummaries, TenantSummary};
use krypton_types::conditions::{ClusterState, Readiness, State};
use krypton_types::tenant::TenantKey;

/// Maximum size of the list in one EdgeCluster, in bytes. Keeps the object far below the limit of etcd.
const LIST_SIZE_MAX: usize = 128 * 1024;
/// Size of an entry without its texts: field names, quotes and the state.
const ENTRY_SIZE: usize = 72;
/// Longest reason in an entry or in a report without messages, in bytes.
pub(crate) const REASON_MAX: usize = 128;

/// Lists as many Tenants as fit, sorted by severity and then by name.
pub(super) fn summaries<'a>(
    reported: impl Iterator<Item = (&'a TenantKey, &'a ClusterState)>,
    allow_chart_skip: bool,
) -> TenantSummaries {
    let mut all: Vec<_> = reported
        .map(|(key, state)| (Readiness::from_state(state, allow_chart_skip), key, state))
        .collect();
    all.sort_by_key(|(readiness, key, _)| (*readiness, *key));
    let (mut listed, mut size) = (TenantSummaries::default(), 0);
    for (readiness, key, state) in all {
        let reason = state_with_reason(state, readiness)
            .truncated(REASON_MAX, 0)
            .reason;
        size += ENTRY_SIZE + key.namespace.len() + key.name.len() + reason.len();
        if size > LIST_SIZE_MAX {
            listed.omitted += 1;
            continue;
        }
        listed.tenants.push(TenantSummary {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            state: state_name(readiness).to_owned(),
            reason,
        });
    }
    listed
}

/// Returns the condition that explains the readiness.
pub(crate) fn state_with_reason(state: &ClusterState, readiness: Readiness) -> &State {
    match (&state.error, readiness) {
        (Some(error), Readiness::Error) => error,
        _ => &state.ready,
    }
}

pub(crate) fn state_name(readiness: Readiness) -> &'static str {
    match readiness {
        Readiness::Error => "Error",
        Readiness::NotReady => "NotReady",
        Readiness::Unknown => "Unknown",
        Readiness::Ready => "Ready",
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::conditions::Truth;

    use super::*;

    #[test]
    fn tenant_listing_is_bounded_and_worst_first() {
        let state = |number: usize| {
            let truth = [Truth::True, Truth::False][number % 2];
            ClusterState::from(State::new(truth, "R".repeat(number % 1024 + 1), ""))
        };
        for (count, name) in [(3, 3), (10_000, 12), (10_000, 253)] {
            let tenants: Vec<_> = (0..count)
                .map(|number| {
                    let key = TenantKey::new("n".repeat(63), format!("{number:0name$}"));
                    (key, state(number))
                })
                .collect();
            let listed = summaries(tenants.iter().map(|(key, state)| (key, state)), false);
            assert_eq!(listed.tenants.len() + listed.omitted as usize, count);
            let size = serde_json::to_vec(&listed).unwrap().len();
            assert!(size < LIST_SIZE_MAX + 256, "{size}");
            assert!(
                listed
                    .tenants
                    .is_sorted_by_key(|tenant| tenant.state == "Ready")
            );
            assert_eq!(listed.omitted == 0, count == 3);
        }
    }
}
