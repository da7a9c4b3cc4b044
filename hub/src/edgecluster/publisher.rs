//! Builds the desired state of each member from the fleet's settings and the member's own. Performs no I/O.

use std::sync::Arc;

use krypton_runtime::clock::BootTime;
use krypton_types::deployment::DesiredDeployment;
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::desired::{ChartState, DesiredState, Version};
use krypton_types::placed_tenant::PlacedTenant;

use crate::members::member::PublishedState;

/// Creates desired states. Members with equal inputs share one, and the version of each member only increases.
#[derive(Debug, Default)]
pub struct DesiredStatePublisher {
    /// The settings that are the same for all members. Its other fields are unused.
    fleet: DesiredState,
    generation: u64,
    /// The latest shared desired state for each combination of `paused` and `retire`.
    latest: [Option<PublishedState>; 4],
}

/// How a member handles its releases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberOrder {
    pub paused: bool,
    pub retire: bool,
}

/// The inputs of a member's desired state.
#[derive(Clone, Copy, Debug)]
pub struct MemberInputs<'a> {
    pub chart: &'a ChartState,
    /// Whether only this member receives this chart state. Then the desired state is not shared.
    pub is_override: bool,
    /// Metadata of workspaces. If it differs from the fleet's, the desired state is not shared.
    pub namespaces: &'a NamespaceConfiguration,
    /// Orders of the home cluster for this member. If there are any, the desired state is not shared.
    pub deployments: &'a [DesiredDeployment],
    /// Tenants of the home cluster that are placed on this member. If there are any, the desired state is not
    /// shared.
    pub placed: &'a [PlacedTenant],
}

impl DesiredStatePublisher {
    /// `fleet` has the settings that are the same for all members.
    pub fn new(fleet: DesiredState) -> Self {
        Self {
            fleet,
            ..Self::default()
        }
    }

    /// Returns the member's next desired state, or `None` if `current` is up to date.
    pub fn next(
        &mut self,
        current: Option<&PublishedState>,
        epoch: u64,
        inputs: &MemberInputs<'_>,
        order: MemberOrder,
        now: BootTime,
    ) -> Option<PublishedState> {
        let MemberInputs {
            chart,
            is_override,
            namespaces,
            deployments,
            placed,
        } = *inputs;
        let is_override = is_override
            || *namespaces != self.fleet.namespaces
            || !deployments.is_empty()
            || !placed.is_empty();
        let is_up_to_date = |published: &PublishedState| {
            published.desired.version.epoch == epoch
                && (published.desired.paused, published.desired.retire)
                    == (order.paused, order.retire)
                && published.desired.drift == self.fleet.drift
                && published.desired.chart_crds == self.fleet.chart_crds
                && published.desired.tenant_values == self.fleet.tenant_values
                && published.desired.handling == self.fleet.handling
                && published.desired.lockdown == self.fleet.lockdown
                && published.desired.chart == *chart
                && published.desired.namespaces == *namespaces
                && published.desired.deployments == deployments
                && published.desired.placed == placed
        };
        if current.is_some_and(is_up_to_date) {
            return None;
        }
        let is_newer = |published: &PublishedState| {
            current.is_none_or(|current| current.desired.version < published.desired.version)
        };
        let latest = &mut self.latest[usize::from(order.paused) + 2 * usize::from(order.retire)];
        if let Some(published) = latest
            .as_ref()
            .filter(|published| !is_override && is_up_to_date(published) && is_newer(published))
        {
            return Some(published.clone());
        }
        self.generation += 1;
        let desired = DesiredState {
            version: Version {
                epoch,
                generation: self.generation,
            },
            chart: chart.clone(),
            paused: order.paused,
            retire: order.retire,
            namespaces: namespaces.clone(),
            deployments: deployments.to_vec(),
            placed: placed.to_vec(),
            ..self.fleet.clone()
        };
        let published = PublishedState {
            message: Arc::new((&desired).into()),
            desired: Arc::new(desired),
            since: now,
        };
        if !is_override {
            *latest = Some(published.clone());
        }
        Some(published)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use krypton_types::desired::lockdown::Lockdown;
    use proptest::prelude::*;

    use super::*;

    static NO_METADATA: NamespaceConfiguration = NamespaceConfiguration {
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
    };

    fn chart(version: u8) -> Arc<ChartState> {
        Arc::new(ChartState {
            repo: "https://example.org".to_owned(),
            name: "small".to_owned(),
            version: format!("1.0.{version}"),
            ..ChartState::default()
        })
    }

    fn shared_inputs(chart: &ChartState) -> MemberInputs<'_> {
        MemberInputs {
            chart,
            is_override: false,
            namespaces: &NO_METADATA,
            deployments: &[],
            placed: &[],
        }
    }

    impl DesiredStatePublisher {
        fn publish(
            &mut self,
            current: Option<&PublishedState>,
            inputs: &MemberInputs<'_>,
        ) -> Option<PublishedState> {
            self.next(current, 1, inputs, MemberOrder::default(), BootTime::now())
        }
    }

    #[test]
    fn member_override_leaves_shared_desired_state_unchanged() {
        let mut publisher = DesiredStatePublisher::default();
        let (all, member_chart) = (chart(1), chart(2));
        let shared = shared_inputs(&all);
        let namespaces = NamespaceConfiguration {
            labels: [("team".to_owned(), "a".to_owned())].into(),
            ..NamespaceConfiguration::default()
        };
        let other_chart = MemberInputs {
            is_override: true,
            ..shared_inputs(&member_chart)
        };
        let other_namespaces = MemberInputs {
            namespaces: &namespaces,
            ..shared
        };
        for inputs in [other_chart, other_namespaces] {
            let first = publisher.publish(None, &shared).unwrap();
            assert!(publisher.publish(Some(&first), &shared).is_none());
            let specific = publisher.publish(Some(&first), &inputs).unwrap();
            assert!(specific.desired.version > first.desired.version);
            assert!(publisher.publish(Some(&specific), &inputs).is_none());
            let second = publisher.publish(None, &shared).unwrap();
            assert!(Arc::ptr_eq(&first.desired, &second.desired));
            // A member without its override gets the shared state, with a later version than its own.
            let shared_again = publisher.publish(Some(&specific), &shared).unwrap();
            assert_eq!(shared_again.desired.chart, *all);
            assert_eq!(shared_again.desired.namespaces, NO_METADATA);
            assert!(shared_again.desired.version > specific.desired.version);
        }
    }

    #[test]
    fn orders_reach_their_member_and_changes_bump_version() {
        let mut publisher = DesiredStatePublisher::default();
        let all = chart(1);
        let first = publisher.publish(None, &shared_inputs(&all)).unwrap();
        let [orders, removals] = [false, true].map(|remove| {
            [DesiredDeployment {
                name: "acme".to_owned(),
                remove,
                ..DesiredDeployment::default()
            }]
        });
        let inputs = MemberInputs {
            deployments: &orders,
            ..shared_inputs(&all)
        };
        let specific = publisher.publish(Some(&first), &inputs).unwrap();
        assert_eq!(specific.desired.deployments, orders);
        assert!(publisher.publish(Some(&specific), &inputs).is_none());
        let other = publisher.publish(None, &shared_inputs(&all)).unwrap();
        assert!(Arc::ptr_eq(&first.desired, &other.desired));
        let inputs = MemberInputs {
            deployments: &removals,
            ..inputs
        };
        let removes = publisher.publish(Some(&specific), &inputs).unwrap();
        assert!(removes.desired.version > specific.desired.version);
    }

    #[test]
    fn lockdown_goes_to_every_member() {
        let lockdown = Lockdown {
            no_cross_namespace_refs: true,
            default_service_account: "installer".to_owned(),
        };
        let plain = DesiredStatePublisher::default().publish(None, &shared_inputs(&chart(1)));
        let mut publisher = DesiredStatePublisher::new(DesiredState {
            lockdown: lockdown.clone(),
            ..DesiredState::default()
        });
        let locked = publisher.publish(plain.as_ref(), &shared_inputs(&chart(1)));
        assert_eq!(locked.unwrap().desired.lockdown, lockdown);
    }

    proptest! {
        #[test]
        fn desired_state_version_only_increases_per_member(
            steps in proptest::collection::vec((0_usize..3, 0_u8..3, any::<[bool; 2]>(), any::<bool>()), 1..60)
        ) {
            let mut publisher = DesiredStatePublisher::default();
            let mut epoch = 1;
            let mut members: [Option<PublishedState>; 3] = [None, None, None];
            for (member, version, [paused, retire], later_epoch) in steps {
                let order = MemberOrder { paused, retire };
                epoch += u64::from(later_epoch);
                let current = members[member].clone();
                if let Some(next) = publisher.next(current.as_ref(), epoch, &shared_inputs(&chart(version)), order, BootTime::now()) {
                    prop_assert!(current.is_none_or(|current| current.desired.version < next.desired.version));
                    members[member] = Some(next);
                }
                let now = members[member].as_ref().unwrap();
                prop_assert_eq!((now.desired.paused, now.desired.retire), (paused, retire));
                prop_assert_eq!(&now.desired.chart, &*chart(version));
            }
        }
    }
}
