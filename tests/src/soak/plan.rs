//! Generates the faults and their times as a pure function of the seed.

use std::{collections::BTreeSet, time::Duration};

use krypton_tests::{Fault as RepositoryFault, Traffic};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use super::{
    fault::{Action, FALSE_RESPONSES, Fault, FaultTarget, Kind, MARKS},
    whom::{Edge, HubId, Object, Tenant, Workspace},
};

/// Minimum length of a burst, in seconds.
const MIN_BURST: u64 = 60;
const MAX_BURST: u64 = 120;
/// Seconds of a burst for each fault.
const SECONDS_PER_FAULT: u64 = 3;
/// Minimum share of an edge cluster's slots with live Tenants.
const MIN_LIVE_SHARE: (usize, usize) = (2, 3);

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
    /// Plans faults for `tenants` slots on both edge clusters. A slot has a name and is live or not.
    pub(crate) fn new(seed: u64, tenants: usize, hubs: usize) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let slots = (0..tenants)
            .map(|_| Slot {
                live: true,
                workspace: random_workspace(&mut rng),
            })
            .collect();
        Self {
            rng,
            slots,
            hubs,
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
#[derive(Default)]
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
            ..Draft::default()
        };
        for _ in 0..length / SECONDS_PER_FAULT {
            let kind = self.random_kind();
            if let Some(fault) = self.random_fault(kind, &draft) {
                self.schedule(fault, &mut draft);
            }
        }
        // Every Tenant gets a Helm run in each burst, which detects damaged releases.
        self.message += 1;
        let fault = Fault {
            action: Action::Message(self.message),
            away: Duration::ZERO,
        };
        let at = Duration::from_secs(length - 5) - fault.settled_after();
        draft.steps.push(ScheduledFault { at, fault });
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

    /// Returns `None` if the kind has no free target.
    fn random_fault(&mut self, kind: Kind, draft: &Draft) -> Option<Fault> {
        let action = self.random_action(kind, draft)?;
        let away = self.random_outage(kind);
        Some(Fault { action, away })
    }

    fn random_action(&mut self, kind: Kind, draft: &Draft) -> Option<Action> {
        let edge = match self.rng.random_bool(0.5) {
            true => Edge::One,
            false => Edge::Two,
        };
        let action = match kind {
            Kind::HubKilled => Action::HubKilled(self.random_hub()),
            Kind::HubStopped => Action::HubStopped(self.random_hub()),
            Kind::HubFrozen => Action::HubFrozen(self.random_hub()),
            Kind::LeadFrozen => Action::LeadFrozen,
            Kind::HubsKilled => Action::HubsKilled,
            Kind::HomeWay => Action::HomeWay(self.random_hub(), self.random_traffic()),
            Kind::AgentKilled => Action::AgentKilled,
            Kind::HelmKilled => Action::HelmKilled,
            Kind::AgentFrozen => Action::AgentFrozen,
            Kind::ApiserverKilled => Action::ApiserverKilled(edge),
            Kind::PowerLost => Action::PowerLost(edge),
            Kind::Link => {
                let hub = self.rng.random_bool(0.7).then(|| self.random_hub());
                Action::Link(hub, self.random_traffic())
            }
            Kind::Way => Action::Way(edge, self.random_traffic()),
            Kind::Answers => {
                let draw = self.rng.random_range(0..FALSE_RESPONSES.len());
                Action::Answers(edge, FALSE_RESPONSES[draw])
            }
            Kind::Kubeconfig => Action::Kubeconfig,
            Kind::Message => {
                self.message += 1;
                Action::Message(self.message)
            }
            Kind::Version => {
                self.version = (self.version + 1) % 2;
                Action::Version(self.version)
            }
            Kind::Repository => Action::Repository(match self.rng.random_range(0..3) {
                0 => None,
                1 => Some(RepositoryFault::Down(503)),
                _ => Some(RepositoryFault::Rubbish),
            }),
            Kind::Crd => {
                let is_free = !draft.edges_with_crd_deletion.contains(&edge)
                    && !draft.edges_with_finalizer.contains(&edge);
                is_free.then_some(Action::Crd(edge))?
            }
            Kind::Created => {
                let tenant = self.random_tenant(draft, false)?;
                Action::Created(tenant, random_workspace(&mut self.rng))
            }
            _ => {
                let tenant = self.random_tenant(draft, true)?;
                self.tenant_action(kind, tenant, draft)?
            }
        };
        Some(action)
    }

    fn tenant_action(&mut self, kind: Kind, tenant: Tenant, draft: &Draft) -> Option<Action> {
        let enough_live_tenants = || {
            let slots = self.slots.iter().enumerate();
            let on_edge = slots.filter(|(slot, _)| Tenant(*slot).edge() == tenant.edge());
            let live: Vec<bool> = on_edge.map(|(_, slot)| slot.live).collect();
            let count = live.iter().filter(|live| **live).count();
            count * MIN_LIVE_SHARE.1 > live.len() * MIN_LIVE_SHARE.0
        };
        let action = match kind {
            Kind::Deleted => enough_live_tenants().then_some(Action::Deleted(tenant))?,
            Kind::Recreated => Action::Recreated(tenant, random_workspace(&mut self.rng)),
            Kind::WorkspaceSet => {
                let unset = self.slots.get(tenant.0)?.workspace == Workspace::Unset;
                unset.then_some(Action::WorkspaceSet(tenant))?
            }
            Kind::Paused => Action::Paused(tenant),
            Kind::ReleaseDeleted => Action::ReleaseDeleted(tenant, self.rng.random_bool(0.3)),
            Kind::ReleaseDamaged => Action::ReleaseDamaged(tenant),
            Kind::ReleaseMarked => {
                let draw = self.rng.random_range(0..MARKS.len());
                Action::ReleaseMarked(tenant, MARKS[draw])
            }
            Kind::ForeignObject => {
                self.foreign += 1;
                Action::ForeignObject(tenant, self.foreign)
            }
            Kind::ForeignRelease => {
                self.foreign += 1;
                Action::ForeignRelease(tenant, self.foreign)
            }
            Kind::ForeignFinalizer => (!draft.edges_with_crd_deletion.contains(&tenant.edge()))
                .then_some(Action::ForeignFinalizer(tenant))?,
            Kind::Drift => {
                let object = Object::ALL[self.rng.random_range(0..Object::ALL.len())];
                let gone = self.rng.random_bool(0.4);
                // Corrections of repeated drift back off, so each burst changes only a third of the Tenants.
                let is_due = tenant.0 % 3 == self.number % 3;
                is_due.then_some(Action::Drift(tenant, object, gone))?
            }
            _ => return None,
        };
        Some(action)
    }

    /// Returns the time until the fault is repaired.
    fn random_outage(&mut self, kind: Kind) -> Duration {
        let seconds = match kind {
            Kind::HubKilled | Kind::HubStopped | Kind::HubsKilled | Kind::AgentKilled => 1..=8,
            // Shorter and longer than the leader's Lease.
            Kind::HubFrozen => 1..=15,
            // Longer than the leader's Lease, and sometimes also longer than a member's.
            Kind::LeadFrozen => match self.rng.random_bool(0.8) {
                true => 7..=40,
                false => 61..=70,
            },
            // Shorter and longer than the Lease.
            Kind::AgentFrozen => match self.rng.random_bool(0.5) {
                true => 5..=40,
                false => 61..=70,
            },
            Kind::ApiserverKilled => 1..=15,
            Kind::PowerLost => 1..=10,
            Kind::HomeWay | Kind::Link | Kind::Way => 3..=35,
            Kind::Answers => 2..=15,
            Kind::Kubeconfig | Kind::Repository => 3..=20,
            Kind::Paused => 3..=30,
            _ => return Duration::ZERO,
        };
        Duration::from_secs(self.rng.random_range(seconds))
    }

    fn random_hub(&mut self) -> HubId {
        let hubs = HubId::first(self.hubs);
        let draw = self.rng.random_range(0..hubs.len());
        hubs.get(draw).copied().unwrap_or(HubId::A)
    }

    fn random_traffic(&mut self) -> Traffic {
        match self.rng.random_range(0..5) {
            0 | 1 => Traffic::Cut,
            2 => Traffic::Delay(Duration::from_millis(self.rng.random_range(50..1500))),
            3 => Traffic::Swallow {
                there: true,
                back: true,
            },
            _ => Traffic::Freeze,
        }
    }

    fn random_tenant(&mut self, draft: &Draft, live: bool) -> Option<Tenant> {
        let slots = self.slots.iter().enumerate();
        let candidates: Vec<usize> = slots
            .filter(|(slot, state)| state.live == live && !draft.used_slots.contains(slot))
            .map(|(slot, _)| slot)
            .collect();
        if candidates.is_empty() {
            return None;
        }
        let draw = self.rng.random_range(0..candidates.len());
        candidates.get(draw).copied().map(Tenant)
    }

    /// Adds the fault to the burst at a random time, if there is room.
    fn schedule(&mut self, fault: Fault, draft: &mut Draft) {
        let settled_after = fault.settled_after().as_secs();
        let Some(latest_start) = draft.length.checked_sub(settled_after) else {
            return;
        };
        let at = self.rng.random_range(0..=latest_start);
        // The aftermath may overlap with others' faults, but the fault itself may not.
        let until = at + fault.occupied_for().as_secs();
        let target = fault.action.target();
        let is_occupied = draft
            .busy
            .iter()
            .any(|(other, from, to)| other.overlaps(&target) && at < *to && *from < until);
        if is_occupied {
            return;
        }
        draft.busy.push((target, at, until));
        if let Some(Tenant(slot)) = fault.action.tenant() {
            draft.used_slots.insert(slot);
        }
        match fault.action {
            Action::Crd(edge) => {
                draft.edges_with_crd_deletion.insert(edge);
            }
            Action::ForeignFinalizer(tenant) => {
                draft.edges_with_finalizer.insert(tenant.edge());
            }
            _ => {}
        }
        self.apply_effects(fault.action);
        draft.steps.push(ScheduledFault {
            at: Duration::from_secs(at),
            fault,
        });
    }

    /// Updates the slots with the effects of the action.
    fn apply_effects(&mut self, action: Action) {
        let (tenant, live, workspace) = match action {
            Action::Created(tenant, workspace) | Action::Recreated(tenant, workspace) => {
                (tenant, true, Some(workspace))
            }
            Action::Deleted(tenant) => (tenant, false, None),
            Action::WorkspaceSet(tenant) => (tenant, true, Some(Workspace::Named)),
            _ => return,
        };
        if let Some(slot) = self.slots.get_mut(tenant.0) {
            slot.live = live;
            slot.workspace = workspace.unwrap_or(slot.workspace);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn bursts(seed: u64, tenants: usize, count: usize) -> Vec<Burst> {
        FaultPlan::new(seed, tenants, 2).take(count).collect()
    }

    #[test]
    fn plan_is_determined_by_seed() {
        assert_eq!(bursts(7, 50, 15), bursts(7, 50, 15));
        assert_ne!(bursts(7, 50, 15), bursts(8, 50, 15));
        let initial_tenants = |seed| FaultPlan::new(seed, 50, 2).initial_tenants();
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
            for burst in FaultPlan::new(seed, 50, hubs).take(15) {
                for step in burst.steps {
                    *kinds.entry(step.fault.action.kind()).or_default() += 1;
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
        let hub_faults = |step: &&ScheduledFault| match step.fault.action {
            Action::HubKilled(other) | Action::HubStopped(other) | Action::HubFrozen(other) => {
                other == hub
            }
            Action::LeadFrozen | Action::HubsKilled | Action::Version(_) => true,
            _ => false,
        };
        let hub_faults: Vec<&ScheduledFault> = burst.steps.iter().filter(hub_faults).collect();
        hub_faults
            .windows(2)
            .filter(|pair| match pair {
                [first, next] => next.at < first.at + first.fault.away,
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
                    if let Action::HubKilled(hub) = step.fault.action {
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
                if step.fault.action == Action::LeadFrozen {
                    assert!(
                        step.fault.away > krypton_hub::args::LEASE_DURATION,
                        "{step:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_single_hub_plan_names_no_second_hub() {
        for seed in 0..20 {
            for burst in FaultPlan::new(seed, 50, 1).take(10) {
                let text = format!("{burst:?}");
                assert!(!text.contains("(B"), "{text}");
            }
        }
    }

    #[test]
    fn only_live_tenants_are_deleted_and_absent_created() {
        for seed in 0..20 {
            let plan = FaultPlan::new(seed, 20, 2);
            let mut live: BTreeSet<Tenant> = plan
                .initial_tenants()
                .into_iter()
                .map(|(tenant, _)| tenant)
                .collect();
            for burst in plan.take(20) {
                let mut used_slots = BTreeSet::new();
                for step in &burst.steps {
                    let Some(tenant) = step.fault.action.tenant() else {
                        continue;
                    };
                    assert!(
                        used_slots.insert(tenant),
                        "two faults in a burst: {burst:?}"
                    );
                    match step.fault.action {
                        Action::Created(..) => assert!(live.insert(tenant)),
                        Action::Deleted(_) => assert!(live.remove(&tenant)),
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
                    let of_kind = burst
                        .steps
                        .iter()
                        .filter(|step| step.fault.action.kind() == kind);
                    of_kind
                        .filter_map(|step| step.fault.action.edge())
                        .collect()
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
