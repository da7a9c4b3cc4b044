//! Generates the faults and their times as a pure function of the seed.

use std::{collections::BTreeSet, time::Duration};

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use super::{
    fault::{ApiserverFault, Fault, FaultTarget, Kind, Mark, RepositoryFault, TrafficFault},
    whom::{Edge, HubId, Object, Tenant, Workspace},
};

/// Minimum length of a burst, in seconds.
const MIN_BURST: u64 = 60;
const MAX_BURST: u64 = 120;
/// Seconds of a burst for each fault.
const SECONDS_PER_FAULT: u64 = 3;
/// Minimum share of an edge cluster's slots with live Tenants.
const MIN_LIVE_SHARE: (usize, usize) = (2, 3);

/// The parameters of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlanParameters {
    pub(crate) seed: u64,
    /// Number of Tenant slots on both edge clusters. A slot has a name and is live or not.
    pub(crate) tenants: usize,
    pub(crate) hubs: usize,
}

/// A fault and its start within the burst.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ScheduledFault {
    pub(crate) at: Duration,
    pub(crate) fault: Fault,
}

/// Faults that end before the burst does, including the time that Krypton may wait after each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Burst {
    pub(crate) number: usize,
    pub(crate) length: Duration,
    pub(crate) steps: Vec<ScheduledFault>,
}

/// The state of a slot after the bursts so far.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slot {
    live: bool,
    workspace: Workspace,
}

/// An infinite sequence of bursts.
#[derive(Debug)]
pub(crate) struct FaultPlan {
    rng: Xoshiro256PlusPlus,
    slots: Vec<Slot>,
    hubs: usize,
    version: u32,
    message: u32,
    foreign: u32,
    number: usize,
}

impl FaultPlan {
    pub(crate) fn new(parameters: PlanParameters) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(parameters.seed);
        let slots = (0..parameters.tenants)
            .map(|_| Slot {
                live: true,
                workspace: random_workspace(&mut rng),
            })
            .collect();
        Self {
            rng,
            slots,
            hubs: parameters.hubs,
            version: 0,
            message: 0,
            foreign: 0,
            number: 0,
        }
    }

    /// Returns all initial Tenants with their workspaces.
    pub(crate) fn initial_tenants(&self) -> Vec<(Tenant, Workspace)> {
        let all = self.slots.iter().enumerate();
        all.map(|(slot, state)| (Tenant(slot), state.workspace))
            .collect()
    }
}

fn random_workspace(rng: &mut Xoshiro256PlusPlus) -> Workspace {
    match rng.random_range(0..4) {
        0 => Workspace::Unset,
        1 => Workspace::Shared(rng.random_range(0..2)),
        _ => Workspace::Own,
    }
}

/// A burst during its generation.
struct Draft {
    length: u64,
    /// (target, from, until) in seconds. Faults of the same target don't overlap.
    busy: Vec<(FaultTarget, u64, u64)>,
    /// Tenants with a fault. Each gets one fault for each burst.
    used_slots: BTreeSet<usize>,
    edges_with_crd_deletion: BTreeSet<Edge>,
    edges_with_finalizer: BTreeSet<Edge>,
    steps: Vec<ScheduledFault>,
}

impl Iterator for FaultPlan {
    type Item = Burst;

    fn next(&mut self) -> Option<Burst> {
        let length = self.rng.random_range(MIN_BURST..=MAX_BURST);
        let mut draft = Draft {
            length,
            busy: Vec::new(),
            used_slots: BTreeSet::new(),
            edges_with_crd_deletion: BTreeSet::new(),
            edges_with_finalizer: BTreeSet::new(),
            steps: Vec::new(),
        };
        for _ in 0..length / SECONDS_PER_FAULT {
            let kind = self.random_kind();
            if let Some(fault) = self.random_fault(kind, &draft) {
                self.schedule(fault, &mut draft);
            }
        }
        // Every Tenant gets a Helm run in each burst, which detects damaged releases.
        self.message += 1;
        let last_fault = Fault::Message {
            number: self.message,
        };
        let at = length - seconds(last_fault.settled_after()) - 5;
        draft.steps.push(ScheduledFault {
            at: Duration::from_secs(at),
            fault: last_fault,
        });
        draft.steps.sort_by_key(|step| step.at);
        self.number += 1;
        Some(Burst {
            number: self.number,
            length: Duration::from_secs(length),
            steps: draft.steps,
        })
    }
}

impl FaultPlan {
    fn random_kind(&mut self) -> Kind {
        let total_weight: u32 = Kind::for_hubs(self.hubs).map(|(_, weight)| weight).sum();
        let mut draw = self.rng.random_range(0..total_weight);
        for (kind, weight) in Kind::for_hubs(self.hubs) {
            if draw < weight {
                return kind;
            }
            draw -= weight;
        }
        Kind::Message
    }

    fn random_fault(&mut self, kind: Kind, draft: &Draft) -> Option<Fault> {
        let edge = if self.rng.random_bool(0.5) {
            Edge::One
        } else {
            Edge::Two
        };
        let away = |plan: &mut Self, from: u64, to: u64| {
            Duration::from_secs(plan.rng.random_range(from..=to))
        };
        let fault = match kind {
            Kind::HubKilled => Fault::HubKilled {
                hub: self.random_hub(),
                away: away(self, 1, 8),
            },
            Kind::HubStopped => Fault::HubStopped {
                hub: self.random_hub(),
                away: away(self, 1, 8),
            },
            // Shorter and longer than the leader's Lease.
            Kind::HubFrozen => Fault::HubFrozen {
                hub: self.random_hub(),
                away: away(self, 1, 15),
            },
            // Longer than the leader's Lease, and sometimes also longer than a member's.
            Kind::LeadFrozen => Fault::LeadFrozen {
                away: match self.rng.random_bool(0.8) {
                    true => away(self, 7, 40),
                    false => away(self, 61, 70),
                },
            },
            Kind::HubsKilled => Fault::HubsKilled {
                away: away(self, 1, 8),
            },
            Kind::HomeWay => Fault::HomeWay {
                hub: self.random_hub(),
                way: self.random_traffic_fault(),
                away: away(self, 3, 35),
            },
            Kind::AgentKilled => Fault::AgentKilled {
                away: away(self, 1, 8),
            },
            Kind::HelmKilled => Fault::HelmKilled,
            // Shorter and longer than the Lease.
            Kind::AgentFrozen => Fault::AgentFrozen {
                away: match self.rng.random_bool(0.5) {
                    true => away(self, 5, 40),
                    false => away(self, 61, 70),
                },
            },
            Kind::ApiserverKilled => Fault::ApiserverKilled {
                edge,
                away: away(self, 1, 15),
            },
            Kind::PowerLost => Fault::PowerLost {
                edge,
                away: away(self, 1, 10),
            },
            Kind::Link => Fault::Link {
                hub: self.rng.random_bool(0.7).then(|| self.random_hub()),
                way: self.random_traffic_fault(),
                away: away(self, 3, 35),
            },
            Kind::Way => Fault::Way {
                edge,
                way: self.random_traffic_fault(),
                away: away(self, 3, 35),
            },
            Kind::Answers => Fault::Answers {
                edge,
                answer: self.random_response(),
                away: away(self, 2, 15),
            },
            Kind::Kubeconfig => Fault::Kubeconfig {
                away: away(self, 3, 20),
            },
            Kind::Message => {
                self.message += 1;
                Fault::Message {
                    number: self.message,
                }
            }
            Kind::Version => {
                self.version = (self.version + 1) % 2;
                Fault::Version {
                    number: self.version,
                }
            }
            Kind::Repository => Fault::Repository {
                how: match self.rng.random_range(0..3) {
                    0 => RepositoryFault::Gone,
                    1 => RepositoryFault::Failing,
                    _ => RepositoryFault::Rubbish,
                },
                away: away(self, 3, 20),
            },
            Kind::Crd => {
                let is_free = !draft.edges_with_crd_deletion.contains(&edge)
                    && !draft.edges_with_finalizer.contains(&edge);
                is_free.then_some(Fault::Crd { edge })?
            }
            Kind::Created => {
                let tenant = self.random_tenant(draft, false)?;
                Fault::Created {
                    tenant,
                    workspace: random_workspace(&mut self.rng),
                }
            }
            _ => {
                let tenant = self.random_tenant(draft, true)?;
                self.tenant_fault(kind, tenant, draft)?
            }
        };
        Some(fault)
    }

    fn tenant_fault(&mut self, kind: Kind, tenant: Tenant, draft: &Draft) -> Option<Fault> {
        let enough_live_tenants = || {
            let on_edge = |slot: &usize| Tenant(*slot).edge() == tenant.edge();
            let all = (0..self.slots.len()).filter(on_edge).count();
            let live = (0..self.slots.len())
                .filter(on_edge)
                .filter(|slot| self.slots.get(*slot).is_some_and(|slot| slot.live));
            live.count() * MIN_LIVE_SHARE.1 > all * MIN_LIVE_SHARE.0
        };
        let fault = match kind {
            Kind::Deleted => enough_live_tenants().then_some(Fault::Deleted { tenant })?,
            Kind::Recreated => Fault::Recreated {
                tenant,
                workspace: random_workspace(&mut self.rng),
            },
            Kind::WorkspaceSet => {
                let state = self.slots.get(tenant.0)?;
                let unset = state.workspace == Workspace::Unset;
                unset.then_some(Fault::WorkspaceSet { tenant })?
            }
            Kind::Paused => Fault::Paused {
                tenant,
                away: Duration::from_secs(self.rng.random_range(3..=30)),
            },
            Kind::ReleaseDeleted => Fault::ReleaseDeleted {
                tenant,
                all: self.rng.random_bool(0.3),
            },
            Kind::ReleaseDamaged => Fault::ReleaseDamaged { tenant },
            Kind::ReleaseMarked => Fault::ReleaseMarked {
                tenant,
                mark: Mark::ALL[self.rng.random_range(0..Mark::ALL.len())],
            },
            Kind::ForeignObject => {
                self.foreign += 1;
                Fault::ForeignObject {
                    tenant,
                    number: self.foreign,
                }
            }
            Kind::ForeignRelease => {
                self.foreign += 1;
                Fault::ForeignRelease {
                    tenant,
                    number: self.foreign,
                }
            }
            Kind::ForeignFinalizer => (!draft.edges_with_crd_deletion.contains(&tenant.edge()))
                .then_some(Fault::ForeignFinalizer { tenant })?,
            // Corrections of repeated drift back off, so each burst changes only a third of the Tenants.
            Kind::Drift => (tenant.0 % 3 == self.number % 3).then_some(Fault::Drift {
                tenant,
                object: Object::ALL[self.rng.random_range(0..Object::ALL.len())],
                gone: self.rng.random_bool(0.4),
            })?,
            _ => return None,
        };
        Some(fault)
    }

    fn random_hub(&mut self) -> HubId {
        let hubs = HubId::first(self.hubs);
        let draw = self.rng.random_range(0..hubs.len());
        hubs.get(draw).copied().unwrap_or(HubId::A)
    }

    fn random_traffic_fault(&mut self) -> TrafficFault {
        match self.rng.random_range(0..5) {
            0 | 1 => TrafficFault::Cut,
            2 => TrafficFault::Slow(Duration::from_millis(self.rng.random_range(50..1500))),
            3 => TrafficFault::Swallowed,
            _ => TrafficFault::Frozen,
        }
    }

    fn random_response(&mut self) -> ApiserverFault {
        ApiserverFault::ALL[self.rng.random_range(0..ApiserverFault::ALL.len())]
    }

    fn random_tenant(&mut self, draft: &Draft, live: bool) -> Option<Tenant> {
        let candidates: Vec<usize> = (0..self.slots.len())
            .filter(|slot| {
                self.slots
                    .get(*slot)
                    .is_some_and(|state| state.live == live)
            })
            .filter(|slot| !draft.used_slots.contains(slot))
            .collect();
        if candidates.is_empty() {
            return None;
        }
        candidates
            .get(self.rng.random_range(0..candidates.len()))
            .copied()
            .map(Tenant)
    }

    /// Adds the fault to the burst at a random time, if there is room.
    fn schedule(&mut self, fault: Fault, draft: &mut Draft) {
        let settled_after = seconds(fault.settled_after());
        let Some(latest_start) = draft.length.checked_sub(settled_after) else {
            return;
        };
        let at = self.rng.random_range(0..=latest_start);
        // The aftermath may overlap with others' faults, but the fault itself may not.
        let until = at + seconds(fault.occupied_for());
        let target = fault.target();
        let is_occupied = draft
            .busy
            .iter()
            .any(|(other, from, to)| other.overlaps(&target) && at < *to && *from < until);
        if is_occupied {
            return;
        }
        draft.busy.push((target, at, until));
        if let Some(Tenant(slot)) = fault.tenant() {
            draft.used_slots.insert(slot);
        }
        match &fault {
            Fault::Crd { edge } => {
                draft.edges_with_crd_deletion.insert(*edge);
            }
            Fault::ForeignFinalizer { tenant } => {
                draft.edges_with_finalizer.insert(tenant.edge());
            }
            _ => {}
        }
        self.apply_effects(&fault);
        draft.steps.push(ScheduledFault {
            at: Duration::from_secs(at),
            fault,
        });
    }

    /// Updates the slots with the effects of the fault.
    fn apply_effects(&mut self, fault: &Fault) {
        let (tenant, live, workspace) = match fault {
            Fault::Created { tenant, workspace } | Fault::Recreated { tenant, workspace } => {
                (tenant, true, Some(*workspace))
            }
            Fault::Deleted { tenant } => (tenant, false, None),
            Fault::WorkspaceSet { tenant } => (tenant, true, Some(Workspace::Named)),
            _ => return,
        };
        if let Some(slot) = self.slots.get_mut(tenant.0) {
            slot.live = live;
            slot.workspace = workspace.unwrap_or(slot.workspace);
        }
    }
}

fn seconds(duration: Duration) -> u64 {
    duration.as_secs()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn parameters(seed: u64, tenants: usize, hubs: usize) -> PlanParameters {
        PlanParameters {
            seed,
            tenants,
            hubs,
        }
    }

    fn bursts(seed: u64, tenants: usize, count: usize) -> Vec<Burst> {
        FaultPlan::new(parameters(seed, tenants, 2))
            .take(count)
            .collect()
    }

    #[test]
    fn plan_is_determined_by_seed() {
        assert_eq!(bursts(7, 50, 15), bursts(7, 50, 15));
        assert_ne!(bursts(7, 50, 15), bursts(8, 50, 15));
        let initial_tenants = |seed| FaultPlan::new(parameters(seed, 50, 2)).initial_tenants();
        assert_eq!(initial_tenants(7), initial_tenants(7));
    }

    #[test]
    fn a_longer_run_starts_like_a_shorter_one() {
        assert_eq!(bursts(3, 50, 20)[..5], bursts(3, 50, 5));
    }

    #[test]
    fn burst_outlasts_all_its_faults() {
        for seed in 0..50 {
            for burst in bursts(seed, 50, 10) {
                assert!((60..=120).contains(&burst.length.as_secs()), "{burst:?}");
                for step in &burst.steps {
                    let end = step.at + step.fault.settled_after();
                    assert!(end <= burst.length, "seed {seed}: {step:?} of {burst:?}");
                }
                assert!(burst.steps.is_sorted_by_key(|step| step.at));
            }
        }
    }

    #[test]
    fn half_hour_covers_every_possible_fault_kind() {
        for (seed, hubs) in (1..=3).flat_map(|seed| [(seed, 1), (seed, 2)]) {
            let mut kinds: BTreeMap<Kind, usize> = BTreeMap::new();
            for burst in FaultPlan::new(parameters(seed, 50, hubs)).take(15) {
                for step in burst.steps {
                    *kinds.entry(step.fault.kind()).or_default() += 1;
                }
            }
            let generated: Vec<Kind> = kinds.keys().copied().collect();
            let mut all: Vec<Kind> = Kind::for_hubs(hubs).map(|(kind, _)| kind).collect();
            all.sort();
            assert_eq!(generated, all, "seed {seed}, {hubs} hubs: {kinds:?}");
        }
    }

    /// Returns overlapping pairs of faults of this hub's process.
    fn overlapping_faults(burst: &Burst, hub: HubId) -> Vec<Vec<&ScheduledFault>> {
        let hub_faults = |step: &&ScheduledFault| match &step.fault {
            Fault::HubKilled {
                hub: killed_hub, ..
            }
            | Fault::HubStopped {
                hub: killed_hub, ..
            }
            | Fault::HubFrozen {
                hub: killed_hub, ..
            } => *killed_hub == hub,
            Fault::LeadFrozen { .. } | Fault::HubsKilled { .. } | Fault::Version { .. } => true,
            _ => false,
        };
        let hub_faults: Vec<&ScheduledFault> = burst.steps.iter().filter(hub_faults).collect();
        hub_faults
            .windows(2)
            .filter(|pair| match pair {
                [first, next] => next.at < first.at + first.fault.away(),
                _ => false,
            })
            .map(<[&ScheduledFault]>::to_vec)
            .collect()
    }

    #[test]
    fn hub_faults_never_overlap_and_are_balanced() {
        let mut killed: BTreeMap<HubId, usize> = BTreeMap::new();
        for seed in 0..50 {
            for burst in bursts(seed, 50, 10) {
                for hub in HubId::first(2) {
                    assert_eq!(
                        overlapping_faults(&burst, *hub),
                        Vec::<Vec<&ScheduledFault>>::new()
                    );
                }
                for step in &burst.steps {
                    if let Fault::HubKilled { hub, .. } = step.fault {
                        *killed.entry(hub).or_default() += 1;
                    }
                }
            }
        }
        let [a, b] = [HubId::A, HubId::B].map(|hub| killed[&hub]);
        assert!(a.abs_diff(b) * 4 < a + b, "{killed:?}");
    }

    #[test]
    fn frozen_leader_outlasts_its_lease() {
        for seed in 0..20 {
            for step in bursts(seed, 50, 10).iter().flat_map(|burst| &burst.steps) {
                if let Fault::LeadFrozen { away } = step.fault {
                    assert!(away > krypton_hub::args::LEASE_DURATION, "{step:?}");
                }
            }
        }
    }

    #[test]
    fn a_single_hub_plan_names_no_second_hub() {
        for seed in 0..20 {
            for burst in FaultPlan::new(parameters(seed, 50, 1)).take(10) {
                let text = format!("{burst:?}");
                assert!(
                    !text.contains("hub: B") && !text.contains("Some(B)"),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn only_live_tenants_are_deleted_and_absent_created() {
        for seed in 0..20 {
            let plan = FaultPlan::new(parameters(seed, 20, 2));
            let mut live: BTreeSet<Tenant> = plan
                .initial_tenants()
                .into_iter()
                .map(|(tenant, _)| tenant)
                .collect();
            for burst in plan.take(20) {
                let mut used_slots = BTreeSet::new();
                for step in &burst.steps {
                    let Some(tenant) = step.fault.tenant() else {
                        continue;
                    };
                    assert!(
                        used_slots.insert(tenant),
                        "two faults in a burst: {burst:?}"
                    );
                    match step.fault {
                        Fault::Created { .. } => assert!(live.insert(tenant)),
                        Fault::Deleted { .. } => assert!(live.remove(&tenant)),
                        _ => assert!(live.contains(&tenant), "{step:?}"),
                    }
                }
                for edge in [Edge::One, Edge::Two] {
                    let here = live.iter().filter(|tenant| tenant.edge() == edge);
                    assert!(here.count() >= 6, "{burst:?}");
                }
            }
        }
    }

    #[test]
    fn crd_deletion_avoids_edges_with_foreign_finalizer() {
        for seed in 0..50 {
            for burst in bursts(seed, 30, 10) {
                let edges_of = |kind: Kind| -> BTreeSet<_> {
                    let of_kind = burst.steps.iter().filter(|step| step.fault.kind() == kind);
                    of_kind.filter_map(|step| step.fault.edge()).collect()
                };
                let crds = edges_of(Kind::Crd);
                assert!(
                    crds.is_disjoint(&edges_of(Kind::ForeignFinalizer)),
                    "{burst:?}"
                );
            }
        }
    }
}
